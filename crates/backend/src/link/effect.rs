//! Execution of commands. A command has finished when the statuses of the instances show its effect.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use mcp_satellite_actors::audience::CallOrigin;
use mcp_satellite_actors::model::exit::CallError;
use mcp_satellite_actors::model::ids::InstanceId;
use mcp_satellite_actors::model::snapshot::InstanceView;
use mcp_satellite_actors::model::spec::{InstanceSpec, ServerTarget as Reached};
use mcp_satellite_actors::model::status::Status;
use mcp_satellite_actors::rules::slot::RequestedState;
use mcp_satellite_actors::{ClientRelay, RuntimeHandle};
use mcp_satellite_protocol::era::Era;
use mcp_satellite_protocol::rpc::{MessageKind, RpcMessage};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::document::{self, ConfigFetchError, ConfigFetchOutcome};
use super::rules::{CommandEffect, EffectProgress, InstanceScope, ObservedInstance, RetryPacer, effect_progress};
use super::{LinkHost, LinkShared};
use crate::wire::{
    BackendCommand, CommandOutcome, CommandResult, CommandTarget, CommandType, ConfigureEvent, ConfigurePayload,
    HealthCheckPayload,
};

// For the tool list of one server.
const VALIDATION_TIMEOUT: Duration = Duration::from_secs(15);
// The status changes shortly after the response.
const STATUS_CHANGE_TIMEOUT: Duration = Duration::from_secs(5);
// Before the first retry of the configuration.
const FIRST_DELAY: Duration = Duration::from_secs(1);
// Instances in a result.
const RESULT_INSTANCES_MAX: usize = 1000;

#[derive(Debug, Clone, PartialEq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(super) enum CommandAction {
    Configure(ConfigurePayload),
    Restart(CommandTarget),
    Spawn(CommandTarget),
    Kill(CommandTarget),
    HealthCheck(HealthCheckPayload),
}

impl CommandAction {
    // The error describes the problem without the values.
    pub(super) fn from_command(command: &BackendCommand) -> Result<Self, String> {
        fn payload<T: DeserializeOwned>(command: &BackendCommand) -> Result<T, String> {
            let payload = Value::Object(command.payload.clone());
            serde_json::from_value(payload)
                .map_err(|_| "a member of the payload is missing or of the wrong type".to_owned())
        }
        let kind = serde_json::from_value(Value::from(command.command_type.as_str()));
        let Ok(kind) = kind else { return Err("this satellite does not support commands of this type".to_owned()) };
        Ok(match kind {
            CommandType::Configure => Self::Configure(payload(command)?),
            CommandType::Restart => Self::Restart(payload(command)?),
            CommandType::Spawn => Self::Spawn(payload(command)?),
            CommandType::Kill => Self::Kill(payload(command)?),
            CommandType::HealthCheck => {
                let check: HealthCheckPayload = payload(command)?;
                if check.check_type.as_ref().is_some_and(|kind| kind != "credential_validation") {
                    return Err("this satellite does not support health checks of this type".to_owned());
                }
                Self::HealthCheck(check)
            }
        })
    }

    pub(super) fn name(&self) -> &'static str {
        self.into()
    }

    pub(super) fn scope(&self) -> InstanceScope {
        match self {
            Self::Configure(ConfigurePayload { installation_id, team_id, user_id, .. }) => {
                InstanceScope { installation: installation_id.clone(), team: team_id.clone(), user: user_id.clone() }
            }
            Self::Restart(target) | Self::Spawn(target) | Self::Kill(target) => target.clone().into(),
            Self::HealthCheck(check) => check.target.clone().into(),
        }
    }
}

struct InstanceOutcome {
    view: Arc<InstanceView>,
    // Reason why the effect is missing.
    error: Option<String>,
    // Additional member of the result.
    extra_member: Option<(&'static str, &'static str)>,
}

/// Executes `task` and waits until its effect is visible, at most until `deadline`. `again` is true if the task may
/// have been executed before; visible actions are then not repeated.
pub(super) async fn execute_action(
    link: &LinkShared,
    fleet: &dyn LinkHost,
    task: &CommandAction,
    again: bool,
    deadline: Instant,
) -> CommandResult {
    let scope = task.scope();
    let acting = CommandExecution { link, fleet, runtime: fleet.runtime(), started_before: again, deadline };
    let became = match task {
        CommandAction::Configure(configure) => acting.configure(configure, &scope).await,
        CommandAction::Restart(_) => acting.for_each_instance(&scope, |view| acting.restart(view)).await,
        CommandAction::Spawn(_) => acting.for_each_instance(&scope, |view| acting.spawn(view)).await,
        CommandAction::Kill(_) => acting.for_each_instance(&scope, |view| acting.kill(view)).await,
        CommandAction::HealthCheck(_) => acting.for_each_instance(&scope, |view| acting.validate(view)).await,
    };
    match became {
        Ok(became) => summary(&became),
        Err(error) => {
            CommandResult { status: CommandOutcome::Failed, result: Map::new(), error: Some(error), duration_ms: 0 }
        }
    }
}

fn summary(became: &[InstanceOutcome]) -> CommandResult {
    let of = became.len();
    // A user with missing values does not block commands for the other users.
    let waits = |one: &InstanceOutcome| one.view.status == Status::AwaitingUserConfig;
    let all_wait = became.iter().all(waits);
    let failed: Vec<&InstanceOutcome> =
        became.iter().filter(|one| one.error.is_some() && (all_wait || !waits(one))).collect();
    let first = failed.first().map(|one| (one.view.spec.name.to_string(), one.error.clone().unwrap_or_default()));
    let error = first.map(|(name, why)| match failed.len() {
        1 => format!("{name}: {why}"),
        count => format!("{count} of {of} instances failed, the first is {name}: {why}"),
    });
    let shown = |one: &InstanceOutcome| {
        let view = &one.view;
        let mut shown = json!({
            "instance": *view.spec.name,
            "status": view.status,
            "status_message": view.message,
        });
        if let Some((key, value)) = one.extra_member {
            shown[key] = value.into();
        }
        shown
    };
    let mut result = Map::new();
    result.insert("instances".to_owned(), became.iter().take(RESULT_INSTANCES_MAX).map(shown).collect());
    if of > RESULT_INSTANCES_MAX {
        result.insert("instances_in_all".to_owned(), of.into());
    }
    let status = if error.is_some() { CommandOutcome::Failed } else { CommandOutcome::Completed };
    CommandResult { status, result, error, duration_ms: 0 }
}

#[derive(Clone, Copy)]
struct CommandExecution<'a> {
    link: &'a LinkShared,
    fleet: &'a dyn LinkHost,
    runtime: &'a RuntimeHandle,
    started_before: bool,
    deadline: Instant,
}

impl CommandExecution<'_> {
    fn matching_views(&self, scope: &InstanceScope) -> Vec<Arc<InstanceView>> {
        let is_target = |view: &&Arc<InstanceView>| {
            let id = &view.spec.id;
            scope.matches(id.installation.as_str(), id.team.as_str(), id.user.as_str())
        };
        self.runtime.snapshot().iter().filter(is_target).cloned().collect()
    }

    // At least one instance must match.
    async fn for_each_instance<F: Future<Output = InstanceOutcome>>(
        &self,
        scope: &InstanceScope,
        act: impl FnMut(Arc<InstanceView>) -> F,
    ) -> Result<Vec<InstanceOutcome>, String> {
        let views = self.matching_views(scope);
        if views.is_empty() {
            return Err("there is no such instance on this satellite".to_owned());
        }
        Ok(join_all(views.into_iter().map(act)).await)
    }

    async fn restart(self, view: Arc<InstanceView>) -> InstanceOutcome {
        // The satellite has restarted since, and with it all instances.
        if !self.started_before
            && let Err(error) = self.within_deadline(self.runtime.restart(&view.spec.id)).await
        {
            return self.failed_outcome(&view, error);
        }
        let before = if self.started_before { None } else { Some(&*view) };
        self.wait_for_effect(&view, CommandEffect::Up, before, None).await
    }

    async fn spawn(self, view: Arc<InstanceView>) -> InstanceOutcome {
        match self.within_deadline(self.runtime.start(&view.spec.id)).await {
            Ok(()) => self.wait_for_effect(&view, CommandEffect::Up, None, None).await,
            Err(error) => self.failed_outcome(&view, error),
        }
    }

    async fn kill(self, view: Arc<InstanceView>) -> InstanceOutcome {
        match self.within_deadline(self.runtime.stop(&view.spec.id)).await {
            Ok(()) => self.wait_for_effect(&view, CommandEffect::Down, None, None).await,
            Err(error) => self.failed_outcome(&view, error),
        }
    }

    // Lists the tools over the same path as every call.
    async fn validate(self, view: Arc<InstanceView>) -> InstanceOutcome {
        let id = &view.spec.id;
        let answer = async {
            let text = r#"{"jsonrpc":"2.0","id":"credential_validation","method":"tools/list"}"#;
            let message = RpcMessage::parse(text.into()).map_err(|_| "cannot build the request".to_owned())?;
            let origin = CallOrigin { client: u64::MAX, call: 0 };
            let relay = ClientRelay {
                message,
                origin,
                repeatable: true,
                tool: None,
                era: Era::Sessions,
                client: None,
                trace: None,
            };
            // Never cancelled.
            let (_kept, withdrawn) = oneshot::channel();
            let answer = self.runtime.relay(id, relay, Some(VALIDATION_TIMEOUT), withdrawn).await;
            match answer {
                Ok(Some(message)) if message.kind() == MessageKind::Result => Ok(true),
                Ok(_) => Err("the server answered tools/list with an error".to_owned()),
                Err(CallError::Refused { status: Status::RequiresReauth, .. }) => Ok(false),
                Err(error) => Err(error.to_string()),
            }
        };
        let answer = answer.await;
        if answer == Ok(false) {
            let reauth = self.runtime.wait_for(id, |view| view.status == Status::RequiresReauth);
            // Wait until the status reflects the response; a timeout is harmless.
            let _ = timeout_at(Instant::now() + STATUS_CHANGE_TIMEOUT, reauth).await;
        }
        let view = self.runtime.status(id).unwrap_or(view);
        let (credentials, error) = match answer {
            Ok(true) => ("accepted", None),
            Ok(false) => ("refused", None),
            Err(why) => ("unknown", Some(why)),
        };
        InstanceOutcome { view, error, extra_member: Some(("credentials", credentials)) }
    }

    async fn configure(
        &self,
        configure: &ConfigurePayload,
        scope: &InstanceScope,
    ) -> Result<Vec<InstanceOutcome>, String> {
        let before: &HashMap<InstanceId, Arc<InstanceView>> =
            &self.matching_views(scope).into_iter().map(|view| (view.spec.id.clone(), view)).collect();
        let removed = match configure.event {
            ConfigureEvent::McpInstallationDeleted if scope.installation.is_some() => Some(scope),
            ConfigureEvent::TeamMemberRemoved if scope.team.is_some() && scope.user.is_some() => Some(scope),
            // The command does not name what was removed, so applying the configuration is the whole effect.
            _ => None,
        };
        let look = self.refresh_config(removed).await?;
        let wanted = &|view: &InstanceView| look.target_spec(&view.spec);
        match configure.event {
            ConfigureEvent::McpInstallationCreated | ConfigureEvent::McpInstallationUpdated => {
                let see = |view: Arc<InstanceView>| async move {
                    let wanted = wanted(&view).cloned();
                    self.wait_for_effect(&view, CommandEffect::Configured, None, wanted.as_ref()).await
                };
                if scope.installation.is_some() {
                    return self.for_each_instance(scope, see).await;
                }
                // The command names no installation, so only changed instances count.
                let changed = |view: &Arc<InstanceView>| {
                    let same = |before: &Arc<InstanceView>| wanted(view).is_none_or(|wanted| *wanted == *before.spec);
                    !before.get(&view.spec.id).is_some_and(same)
                };
                Ok(join_all(self.matching_views(scope).into_iter().filter(changed).map(see)).await)
            }
            ConfigureEvent::McpInstallationDeleted | ConfigureEvent::TeamMemberRemoved => match removed {
                Some(removed) => self.wait_until_removed(removed).await,
                None => Ok(Vec::new()),
            },
            ConfigureEvent::McpRecovery => {
                self.for_each_instance(scope, |view| async move {
                    let lost = matches!(view.spec.target, Reached::Remote { .. }) && view.status != Status::Online;
                    if lost && let Err(error) = self.within_deadline(self.runtime.reconnect(&view.spec.id)).await {
                        return self.failed_outcome(&view, error);
                    }
                    self.wait_for_effect(&view, CommandEffect::Configured, None, None).await
                })
                .await
            }
            ConfigureEvent::McpRedeploy => {
                self.for_each_instance(scope, |view| async move {
                    let Some(before) = before.get(&view.spec.id) else {
                        return self.wait_for_effect(&view, CommandEffect::Configured, None, None).await;
                    };
                    // A change that needs no restart does not replace the run.
                    let changed = wanted(&view).is_some_and(|wanted| !before.spec.can_continue_as(wanted));
                    // A stop by a person is not undone.
                    let stopped = view.requested_state == RequestedState::Stopped;
                    if !changed
                        && !stopped
                        && !self.started_before
                        && let Err(error) = self.within_deadline(self.runtime.restart(&view.spec.id)).await
                    {
                        return self.failed_outcome(&view, error);
                    }
                    let before = (!self.started_before).then_some(&**before);
                    let wanted = wanted(&view).cloned();
                    self.wait_for_effect(&view, CommandEffect::Configured, before, wanted.as_ref()).await
                })
                .await
            }
        }
    }

    // `removed` is the scope whose removal is expected.
    async fn refresh_config(&self, removed: Option<&InstanceScope>) -> Result<ConfigFetchOutcome, String> {
        let mut pacer = RetryPacer::new(FIRST_DELAY, self.link.plan.backoff_max, self.link.jitter_rng("configure"));
        loop {
            let mut wait = None;
            let again_in = |failure: &ConfigFetchError| {
                if let ConfigFetchError::Call(error) = failure {
                    wait = Some(pacer.delay_after_failure(error.retry_after()));
                }
                wait
            };
            let attempt = async {
                let key = self.link.wait_for_key().await;
                document::refresh(self.link, self.fleet, &key, removed, again_in).await
            };
            let failure = match timeout_at(self.deadline, attempt).await {
                Ok(Ok(look)) => return Ok(look),
                Ok(Err(failure)) => failure,
                Err(_) => return Err("the configuration was not applied in time".to_owned()),
            };
            let (ConfigFetchError::Call(error), Some(wait)) = (&failure, wait) else { return Err(failure.to_string()) };
            let next = Instant::now() + wait;
            if next >= self.deadline {
                return Err(format!("cannot fetch the configuration: {error}"));
            }
            sleep_until(next).await;
        }
    }

    /// Waits until no instance matches `scope`, then erases the data of the removed ones.
    async fn wait_until_removed(&self, scope: &InstanceScope) -> Result<Vec<InstanceOutcome>, String> {
        let mut watch = self.runtime.watch();
        let none = |snapshot: &Arc<mcp_satellite_actors::model::snapshot::Snapshot>| {
            !snapshot.iter().any(|view| {
                let id = &view.spec.id;
                scope.matches(id.installation.as_str(), id.team.as_str(), id.user.as_str())
            })
        };
        if timeout_at(self.deadline, watch.wait_for(none)).await.is_ok() {
            self.fleet.erase(scope).await;
            return Ok(Vec::new());
        }
        let still = |view| InstanceOutcome {
            view,
            error: Some("the instance has not been removed in time".to_owned()),
            extra_member: None,
        };
        Ok(self.matching_views(scope).into_iter().map(still).collect())
    }

    /// Waits for the effect. The run must differ from that of `before`, and the spec must equal `wanted`.
    async fn wait_for_effect(
        &self,
        view: &Arc<InstanceView>,
        effect: CommandEffect,
        before: Option<&InstanceView>,
        wanted: Option<&InstanceSpec>,
    ) -> InstanceOutcome {
        let id = &view.spec.id;
        let judge = |view: &InstanceView| {
            let another = before.is_none_or(|before| view.dormant || view.initialized_at != before.initialized_at);
            effect_progress(
                effect,
                ObservedInstance {
                    status: view.status,
                    wants_to_run: view.requested_state == RequestedState::Running,
                    has_process: view.pid.is_some(),
                    is_new: another && wanted.is_none_or(|wanted| *wanted == *view.spec),
                },
            )
        };
        let mut watch = self.runtime.watch();
        // The snapshot may still show the wanted state from before this command.
        let mut was_wanted = false;
        let settled = watch.wait_for(|snapshot| {
            snapshot.get(id).is_none_or(|view| {
                let superseded =
                    effect == CommandEffect::Up && was_wanted && view.requested_state == RequestedState::Stopped;
                was_wanted |= view.requested_state == RequestedState::Running;
                superseded || judge(view) != EffectProgress::Pending
            })
        });
        // The snapshot that ended the wait is judged, not a later one.
        let (now, in_time) = match timeout_at(self.deadline, settled).await {
            Ok(Ok(snapshot)) => (snapshot.get(id).cloned(), true),
            Ok(Err(_)) | Err(_) => (self.runtime.status(id), false),
        };
        let Some(now) = now else {
            return InstanceOutcome {
                view: view.clone(),
                error: Some("the instance was removed in the meantime".to_owned()),
                extra_member: None,
            };
        };
        let error = match judge(&now) {
            EffectProgress::Visible => None,
            EffectProgress::Pending | EffectProgress::Impossible => {
                let message = now.message.as_ref().map(|message| format!(": {message}")).unwrap_or_default();
                let late = if in_time { "" } else { " at the deadline" };
                Some(format!("the status is {}{late}{message}", now.status))
            }
        };
        InstanceOutcome { view: now, error, extra_member: None }
    }

    fn failed_outcome(&self, view: &Arc<InstanceView>, error: String) -> InstanceOutcome {
        let view = self.runtime.status(&view.spec.id).unwrap_or_else(|| view.clone());
        InstanceOutcome { view, error: Some(error), extra_member: None }
    }

    async fn within_deadline<T, E: std::fmt::Display>(
        &self,
        act: impl Future<Output = Result<T, E>>,
    ) -> Result<(), String> {
        match timeout_at(self.deadline, act).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("the action did not finish in time".to_owned()),
        }
    }
}
