//! Methods of requests and notifications.

#![expect(missing_docs, reason = "the specification describes the methods")]

use rmcp::model::{self, ConstString as _};

/// Start of a session.
pub const INITIALIZE: &str = model::InitializeResultMethod::VALUE;
/// Notification of a client that its session is ready.
pub const INITIALIZED: &str = model::InitializedNotificationMethod::VALUE;
/// Description of a server. Since version 2026-07-28.
pub const DISCOVER: &str = model::DiscoverRequestMethod::VALUE;
/// Check whether the peer responds.
pub const PING: &str = model::PingRequestMethod::VALUE;
/// Stream of notifications of a server. Since version 2026-07-28.
pub const LISTEN: &str = model::SubscriptionsListenRequestMethod::VALUE;
/// First notification of such a stream.
pub const ACKNOWLEDGED: &str = model::SubscriptionsAcknowledgedNotificationMethod::VALUE;
pub const TOOLS_LIST: &str = model::ListToolsRequestMethod::VALUE;
pub const TOOLS_CALL: &str = model::CallToolRequestMethod::VALUE;
pub const RESOURCES_LIST: &str = model::ListResourcesRequestMethod::VALUE;
pub const RESOURCE_TEMPLATES_LIST: &str = model::ListResourceTemplatesRequestMethod::VALUE;
pub const RESOURCES_READ: &str = model::ReadResourceRequestMethod::VALUE;
pub const RESOURCES_SUBSCRIBE: &str = model::SubscribeRequestMethod::VALUE;
pub const RESOURCES_UNSUBSCRIBE: &str = model::UnsubscribeRequestMethod::VALUE;
pub const PROMPTS_LIST: &str = model::ListPromptsRequestMethod::VALUE;
pub const PROMPTS_GET: &str = model::GetPromptRequestMethod::VALUE;
pub const COMPLETE: &str = model::CompleteRequestMethod::VALUE;
pub const SET_LOG_LEVEL: &str = model::SetLevelRequestMethod::VALUE;
pub const TASKS_GET: &str = model::GetTaskMethod::VALUE;
pub const TASKS_UPDATE: &str = model::UpdateTaskMethod::VALUE;
pub const TASKS_CANCEL: &str = model::CancelTaskMethod::VALUE;
pub const CREATE_MESSAGE: &str = model::CreateMessageRequestMethod::VALUE;
pub const ELICIT: &str = model::ElicitationCreateRequestMethod::VALUE;
pub const ROOTS_LIST: &str = model::ListRootsRequestMethod::VALUE;
pub const CANCELLED: &str = model::CancelledNotificationMethod::VALUE;
pub const PROGRESS: &str = model::ProgressNotificationMethod::VALUE;
pub const LOG_MESSAGE: &str = model::LoggingMessageNotificationMethod::VALUE;
pub const TOOLS_CHANGED: &str = model::ToolListChangedNotificationMethod::VALUE;
pub const RESOURCES_CHANGED: &str = model::ResourceListChangedNotificationMethod::VALUE;
pub const RESOURCE_UPDATED: &str = model::ResourceUpdatedNotificationMethod::VALUE;
pub const PROMPTS_CHANGED: &str = model::PromptListChangedNotificationMethod::VALUE;
/// Up to version 2025-11-25; `rmcp` knows only the later name.
pub const TASK_STATUS: &str = "notifications/tasks/status";
/// The user has finished an elicitation by URL. Missing in `rmcp`.
pub const ELICITATION_COMPLETE: &str = "notifications/elicitation/complete";
