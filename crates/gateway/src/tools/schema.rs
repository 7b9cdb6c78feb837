//! Instructions and definitions of the six tools.

pub const INSTRUCTIONS: &str = "This endpoint combines several MCP servers. \
1. Find a tool: call discover_mcp_tools with a few words of what you want to do; spelling need not be exact. \
2. Run it: call execute_mcp_tool with the tool_path that was found and arguments that fit its input_schema. \
3. Resources: list_mcp_resources names them as server|uri, read_mcp_resource reads one. \
When a call fails, read the last sentence of its text, or next_step in _meta[\"mcp-satellite/error\"]. \
When a server or its tools are missing, list_servers returns their status, and reconnect_server starts one again. \
Tools of servers that are not online are not found until they are back.";

pub const TOOLS: &str = r#"{"tools":[
{"name":"discover_mcp_tools","title":"Find tools","description":"Finds tools of all connected MCP servers by a few words that describe the task. Misspelled words are understood. Returns the best matches, each with the tool_path and the input_schema that execute_mcp_tool needs. An empty query lists all tools.",
"inputSchema":{"type":"object","properties":{"query":{"type":"string","maxLength":512,"description":"A few words: what the tool does, its name, its server"},"limit":{"type":"integer","minimum":1,"maximum":50,"default":10,"description":"Maximum number of tools"}},"required":["query"],"additionalProperties":false},
"outputSchema":{"type":"object","properties":{"tools":{"type":"array","items":{"type":"object","properties":{"tool_path":{"type":"string","description":"For execute_mcp_tool"},"description":{"type":"string"},"input_schema":{"type":"object","description":"Schema of the arguments"},"output_schema":{"type":"object"},"annotations":{"type":"object"},"server_name":{"type":"string"},"transport":{"type":"string","enum":["stdio","http","sse"]},"relevance_score":{"type":"number","minimum":0,"maximum":1},"_meta":{"type":"object"}},"required":["tool_path","input_schema","server_name","transport","relevance_score"]}},"total_found":{"type":"integer","minimum":0,"description":"Number of all matching tools, listed or not"},"search_time_ms":{"type":"number","minimum":0}},"required":["tools","total_found","search_time_ms"]},
"annotations":{"title":"Find tools","readOnlyHint":true,"destructiveHint":false,"idempotentHint":true,"openWorldHint":false}},
{"name":"execute_mcp_tool","title":"Run a tool","description":"Runs a tool of a server. Returns the server's result unchanged. Find the tool_path and the schema of the arguments with discover_mcp_tools.",
"inputSchema":{"type":"object","properties":{"tool_path":{"type":"string","description":"server:tool, as returned by discover_mcp_tools"},"arguments":{"type":"object","description":"Arguments that match the tool's input_schema"}},"required":["tool_path"],"additionalProperties":false},
"annotations":{"title":"Run a tool","readOnlyHint":false,"destructiveHint":true,"idempotentHint":false,"openWorldHint":true}},
{"name":"list_mcp_resources","title":"List resources","description":"Lists the resources and resource templates of all connected MCP servers. Their URIs are of the form server|uri, as read_mcp_resource expects them.",
"inputSchema":{"type":"object","properties":{},"additionalProperties":false},
"outputSchema":{"type":"object","properties":{"resources":{"type":"array","items":{"type":"object","properties":{"uri":{"type":"string"}},"required":["uri"]}},"resource_templates":{"type":"array","items":{"type":"object","properties":{"uriTemplate":{"type":"string"}},"required":["uriTemplate"]}}},"required":["resources","resource_templates"]},
"annotations":{"title":"List resources","readOnlyHint":true,"destructiveHint":false,"idempotentHint":true,"openWorldHint":false}},
{"name":"read_mcp_resource","title":"Read a resource","description":"Reads a resource from its server; nothing is cached.",
"inputSchema":{"type":"object","properties":{"uri":{"type":"string","description":"server|uri, as returned by list_mcp_resources; with values for the variables of a template"}},"required":["uri"],"additionalProperties":false},
"outputSchema":{"type":"object","properties":{"contents":{"type":"array","items":{"type":"object","properties":{"uri":{"type":"string"},"mimeType":{"type":"string"},"text":{"type":"string"},"blob":{"type":"string"}}}}},"required":["contents"]},
"annotations":{"title":"Read a resource","readOnlyHint":true,"destructiveHint":false,"idempotentHint":true,"openWorldHint":true}},
{"name":"list_servers","title":"List servers","description":"Returns the status of each MCP server, whether it is connected and healthy, and its last error.",
"inputSchema":{"type":"object","properties":{},"additionalProperties":false},
"outputSchema":{"type":"object","properties":{"servers":{"type":"array","items":{"type":"object","properties":{"name":{"type":"string","description":"Name for reconnect_server, and the first part of tool_path"},"transport":{"type":"string","enum":["stdio","http","sse"]},"url":{"type":"string"},"status":{"type":"string","enum":["awaiting_user_config","provisioning","command_received","connecting","discovering_tools","syncing_tools","online","restarting","offline","error","requires_reauth","permanently_failed"]},"status_message":{"type":"string"},"connected":{"type":"boolean"},"connected_at":{"type":"string","format":"date-time"},"last_error":{"type":"string"},"reconnect_attempt":{"type":"integer","minimum":0},"next_retry_ms":{"type":"integer","minimum":0},"health":{"type":"string","enum":["unknown","healthy","degraded"]},"last_check_at":{"type":"string","format":"date-time"},"consecutive_health_failures":{"type":"integer","minimum":0},"degraded":{"type":"boolean"},"dormant":{"type":"boolean","description":"Asleep; the next call starts the server"},"want":{"type":"string","enum":["running","stopped"]},"tool_count":{"type":"integer","minimum":0}},"required":["name","transport","status","connected","health","degraded","dormant","want","tool_count"]}}},"required":["servers"]},
"annotations":{"title":"List servers","readOnlyHint":true,"destructiveHint":false,"idempotentHint":true,"openWorldHint":false}},
{"name":"reconnect_server","title":"Reconnect a server","description":"Reconnects to a server, or restarts its process, and clears its history of failures. Calls to it that are in progress fail.",
"inputSchema":{"type":"object","properties":{"name":{"type":"string","description":"Name as returned by list_servers"}},"required":["name"],"additionalProperties":false},
"outputSchema":{"type":"object","properties":{"success":{"type":"boolean","description":"Whether the server accepts calls now"},"status":{"type":"string"},"status_message":{"type":"string"}},"required":["success","status"]},
"annotations":{"title":"Reconnect a server","readOnlyHint":false,"destructiveHint":false,"idempotentHint":true,"openWorldHint":true}}
]}"#;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use mcp_satellite_actors::model::status::Status;
    use rmcp::model::ListToolsResult;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn the_sdk_can_parse_the_tool_definitions() {
        let list: ListToolsResult = serde_json::from_str(TOOLS).unwrap();
        let names: Vec<&str> = list.tools.iter().map(|tool| &*tool.name).collect();
        assert_eq!(
            names,
            [
                "discover_mcp_tools",
                "execute_mcp_tool",
                "list_mcp_resources",
                "read_mcp_resource",
                "list_servers",
                "reconnect_server"
            ]
        );
        for tool in &list.tools {
            let annotations = tool.annotations.as_ref().unwrap();
            assert!(annotations.read_only_hint.is_some() && annotations.open_world_hint.is_some(), "{}", tool.name);
            assert!(tool.description.is_some(), "{}", tool.name);
            assert_eq!(tool.input_schema["additionalProperties"], json!(false), "{}", tool.name);
            // Results of a server's own tool have no schema of the satellite.
            assert_eq!(tool.output_schema.is_none(), tool.name == "execute_mcp_tool");
        }
    }

    #[test]
    fn the_schema_lists_every_status() {
        let list: Value = serde_json::from_str(TOOLS).unwrap();
        let known = list["tools"][4].pointer("/outputSchema/properties/servers/items/properties/status/enum").unwrap();
        assert_eq!(*known, json!(Status::ALL.iter().map(|status| status.as_str()).collect::<Vec<_>>()));
    }

    #[test]
    fn the_instructions_are_short() {
        assert!(INSTRUCTIONS.len() <= 900, "{}", INSTRUCTIONS.len());
    }
}
