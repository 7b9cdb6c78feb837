//! The filter of `subscriptions/listen`: which notifications a client receives. Pure.

use std::collections::BTreeSet;

use mcp_satellite_protocol::method;
use mcp_satellite_protocol::rpc::{RpcMessage, member};
use serde::Deserialize;

use super::shared_session::{SUBSCRIPTIONS_MAX, URI_BYTES_MAX, covers, uri_of};
use super::tools::raw::to_json;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SubscriptionFilter {
    pub tools: bool,
    pub prompts: bool,
    pub resources: bool,
    pub uris: BTreeSet<String>,
}

impl SubscriptionFilter {
    pub fn read(params: Option<&str>) -> Result<Self, String> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Notifications {
            #[serde(default)]
            tools_list_changed: Option<bool>,
            #[serde(default)]
            prompts_list_changed: Option<bool>,
            #[serde(default)]
            resources_list_changed: Option<bool>,
            #[serde(default)]
            resource_subscriptions: Option<BTreeSet<String>>,
        }
        let filter = params.and_then(|params| member(params, "notifications"));
        // Serde also accepts an array as an object.
        let filter = filter.filter(|filter| filter.starts_with('{'));
        let filter = filter.ok_or("`notifications` must be an object that selects notifications")?;
        let read: Notifications = serde_json::from_str(filter).map_err(|error| format!("`notifications`: {error}"))?;
        let uris = read.resource_subscriptions.unwrap_or_default();
        if uris.len() > SUBSCRIPTIONS_MAX {
            return Err(format!("`resourceSubscriptions` has more than {SUBSCRIPTIONS_MAX} URIs"));
        }
        if uris.iter().any(|uri| uri.len() > URI_BYTES_MAX) {
            return Err(format!("a URI of `resourceSubscriptions` is longer than {URI_BYTES_MAX} bytes"));
        }
        Ok(Self {
            tools: read.tools_list_changed == Some(true),
            prompts: read.prompts_list_changed == Some(true),
            resources: read.resources_list_changed == Some(true),
            uris,
        })
    }

    /// Removes what a server with these capabilities does not support. A list needs no `listChanged` capability,
    /// because the satellite reads it again after every start of the server and reports changes itself.
    #[must_use]
    pub fn restrict_to(mut self, capabilities: &str) -> Self {
        let has = |name: &str| member(capabilities, name).is_some();
        self.tools &= has("tools");
        self.prompts &= has("prompts");
        self.resources &= has("resources");
        let subscribe = member(capabilities, "resources").and_then(|resources| member(resources, "subscribe"));
        if subscribe != Some("true") {
            self.uris.clear();
        }
        self
    }

    pub fn is_subscribed_to(&self, message: &RpcMessage) -> bool {
        match message.method().unwrap_or_default() {
            method::TOOLS_CHANGED => self.tools,
            method::PROMPTS_CHANGED => self.prompts,
            method::RESOURCES_CHANGED => self.resources,
            method::RESOURCE_UPDATED => uri_of(message).is_some_and(|uri| self.uris.iter().any(|of| covers(of, &uri))),
            _ => false,
        }
    }

    pub fn to_json(&self) -> String {
        let kinds = [
            (self.tools, "toolsListChanged"),
            (self.prompts, "promptsListChanged"),
            (self.resources, "resourcesListChanged"),
        ];
        let kinds = kinds.into_iter().filter(|(is, _)| *is).map(|(_, name)| format!(r#""{name}":true"#));
        let uris = (!self.uris.is_empty()).then(|| format!(r#""resourceSubscriptions":{}"#, to_json(&self.uris)));
        format!("{{{}}}", kinds.chain(uris).collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    fn read(notifications: &str) -> Result<SubscriptionFilter, String> {
        SubscriptionFilter::read(Some(&format!(r#"{{"notifications":{notifications}}}"#)))
    }

    #[test]
    fn a_filter_is_restricted_to_the_requested_and_available_kinds() {
        let all = r#"{"toolsListChanged":true,"promptsListChanged":true,"resourcesListChanged":true,"resourceSubscriptions":["a:b"]}"#;
        let filter = read(all).unwrap();
        assert_eq!(filter.to_json(), all);
        let some = filter.clone().restrict_to(r#"{"tools":{},"resources":{"listChanged":true}}"#);
        assert_eq!(some.to_json(), r#"{"toolsListChanged":true,"resourcesListChanged":true}"#);
        assert_eq!(filter.restrict_to(r#"{"resources":{"subscribe":true}}"#).uris, ["a:b".to_owned()].into());
        assert_eq!(read("{}").unwrap().to_json(), "{}");
        assert!(read("[]").is_err() && read("1").is_err() && SubscriptionFilter::read(None).is_err());
        assert!(read(r#"{"resourceSubscriptions":[1]}"#).is_err());
        let long = format!(r#"{{"resourceSubscriptions":["{}"]}}"#, "a".repeat(URI_BYTES_MAX + 1));
        assert!(read(&long).unwrap_err().contains("bytes"));
        let many: Vec<String> = (0..=SUBSCRIPTIONS_MAX).map(|number| number.to_string()).collect();
        assert!(read(&format!(r#"{{"resourceSubscriptions":{many:?}}}"#)).unwrap_err().contains("1024"));
    }

    #[test]
    fn only_subscribed_notifications_pass_the_filter() {
        let filter = read(r#"{"promptsListChanged":true,"resourceSubscriptions":["file:///a/"]}"#).unwrap();
        let passes = |method: &str, params: &str| {
            let text = format!(r#"{{"jsonrpc":"2.0","method":"notifications/{method}","params":{params}}}"#);
            filter.is_subscribed_to(&RpcMessage::parse(text.into()).unwrap())
        };
        assert!(passes("prompts/list_changed", "{}") && !passes("tools/list_changed", "{}"));
        assert!(passes("resources/updated", r#"{"uri":"file:///a/b"}"#));
        assert!(!passes("resources/updated", r#"{"uri":"file:///b"}"#) && !passes("message", "{}"));
    }
}
