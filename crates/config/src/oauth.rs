//! The `oauth` table of a remote server, parsed and validated.

use mcp_satellite_model::spec::{InstanceConfig, ServerTarget};
use toml_span::Span;

use super::check::ConfigCheck;
use super::reader::{ParsedValue, SpannedText, TableReader};

#[derive(Default)]
pub(crate) struct OAuthTable {
    at: Span,
    grant: ParsedValue<String>,
    client_id: ParsedValue<String>,
    client_secret: ParsedValue<String>,
    client_metadata_url: ParsedValue<String>,
    issuer: ParsedValue<String>,
    scopes: Vec<SpannedText>,
}

pub use mcp_satellite_model::settings::OAuthPlan;

impl OAuthTable {
    pub(crate) fn read(fields: &mut TableReader<'_, '_>) -> Self {
        Self {
            at: fields.at,
            grant: fields.text("grant"),
            client_id: fields.text("client_id"),
            client_secret: fields.text("client_secret"),
            client_metadata_url: fields.text("client_metadata_url"),
            issuer: fields.text("issuer"),
            scopes: fields.texts("scopes").unwrap_or_default(),
        }
    }

    /// Makes the table of a client without a secret.
    pub(crate) fn public(at: Span, client_id: ParsedValue<String>, scopes: Vec<SpannedText>) -> Self {
        Self { at, client_id, scopes, ..Self::default() }
    }

    pub(crate) fn at(&self) -> Span {
        self.at
    }

    pub(crate) fn into_plan(self, subject: &str, check: &mut ConfigCheck<'_, '_>) -> OAuthPlan {
        let grants = [("authorization_code", false), ("client_credentials", true)];
        let machine = check.keyword(&self.grant, "grant", &grants).unwrap_or_default();
        let client_id = self.client_id.get().map(|id| id.value.clone());
        if let Some(empty) = self.client_id.get().filter(|id| id.value.is_empty()) {
            check.findings.error(
                empty.span,
                "`client_id` is empty",
                "leave it out, and the satellite registers itself",
            );
        }
        let what = format!("the client_secret of {subject}");
        let client_secret = self.client_secret.get();
        if let Some(secret) = client_secret.filter(|_| self.client_id.is_absent()) {
            check.findings.error(secret.span, format!("{what} has no `client_id`"), "add client_id = \"…\"");
        }
        if machine && (self.client_id.is_absent() || self.client_secret.is_absent()) {
            let hint = "add client_id = \"…\" and client_secret = \"env:NAME\"";
            check.findings.error(
                self.at,
                format!("{subject} has grant = \"client_credentials\" and no client credentials"),
                hint,
            );
        }
        if let Some(secret) = client_secret.filter(|_| self.issuer.is_absent()) {
            // Otherwise the server would choose the recipient of the secret.
            let hint = "add issuer = \"https://…\", the issuer in the metadata of its authorization server";
            check.findings.error(
                secret.span,
                format!("{what} has no `issuer`, the only server that may receive it"),
                hint,
            );
        }
        let issuer = self.issuer.get().and_then(|text| {
            check.url("issuer", text)?;
            Some(text.value.clone())
        });
        let client_secret =
            client_secret.and_then(|text| check.secret_sources.resolve_secret(&what, text, check.findings));
        let client_metadata_url = self.client_metadata_url.get().and_then(|text| {
            let url = check.url("client_metadata_url", text)?;
            if url.scheme() != "https" || url.path() == "/" {
                let hint = "authorization servers read it: write it as \"https://host/path\"";
                check.findings.error(text.span, "`client_metadata_url` is not an https URL with a path", hint);
            }
            if !self.client_id.is_absent() {
                let hint = "remove one: the URL is the id of the client";
                check.findings.error(
                    text.span,
                    format!("{subject} has a `client_id` and a `client_metadata_url`"),
                    hint,
                );
            }
            Some(text.value.clone())
        });
        let is_scope = |scope: &str| {
            !scope.is_empty() && scope.bytes().all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\'))
        };
        for scope in self.scopes.iter().filter(|scope| !is_scope(&scope.value)) {
            let hint = "write each scope as an entry of its own: scopes = [\"one\", \"two\"]";
            check.findings.error(scope.span, "an entry of `scopes` is not a valid scope", hint);
        }
        let scopes = self.scopes.into_iter().map(|scope| scope.value).collect();
        OAuthPlan { machine, client_id, client_secret, client_metadata_url, issuer, scopes }
    }
}

/// Reports an error if an instance has its own credential or is a stdio server, so that OAuth does not apply.
/// `instances` are those of one installation with an `oauth` table.
pub(crate) fn check_conflicts(subject: &str, at: Span, instances: &[InstanceConfig], check: &mut ConfigCheck<'_, '_>) {
    if instances.iter().any(|instance| matches!(instance.target, ServerTarget::Stdio { .. })) {
        check.findings.error(
            at,
            format!("{subject} is a stdio server with `oauth`"),
            "remove it: OAuth is for remote servers",
        );
        return;
    }
    let is_authorization = |name: &str| name.eq_ignore_ascii_case("authorization");
    let has_own_credential = |instance: &InstanceConfig| {
        let layers = [&instance.server_tier, &instance.team_tier, &instance.user_tier];
        layers.into_iter().any(|layer| layer.headers.keys().any(|name| is_authorization(name)))
            || instance.user_required.iter().any(|name| is_authorization(name))
    };
    if instances.iter().any(has_own_credential) {
        let hint = "remove `oauth`, or the `bearer_token` or header `Authorization`";
        check.findings.error(at, format!("{subject} has `oauth` and a credential of its own"), hint);
    }
}
