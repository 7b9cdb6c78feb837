//! Multi-round requests of protocol 2026-07-28: the server answers a call with the input that it needs, and the client
//! repeats the call with it until nothing is missing. The server keeps no state between two rounds; `requestState`
//! identifies the round that was answered.

use rmcp::model::{ClientCapabilities, ErrorData, InputRequiredResult, InputResponses};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::server::{deserialize, internal, value};

const ROUNDS: &str = include_str!("rounds.json");

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct InputRound {
    input_requests: Map<String, Value>,
    request_state: Option<String>,
}

impl InputRound {
    fn askable(&self, client: &Value) -> Map<String, Value> {
        let requests = self.input_requests.iter().filter(|(_, request)| client.get(needed(request)).is_some());
        requests.map(|(key, request)| (key.clone(), request.clone())).collect()
    }
}

pub(crate) struct InputAnswers {
    pub(crate) responses: Option<InputResponses>,
    pub(crate) state: Option<String>,
}

/// Returns the requests to send to the client before the call can be answered, or `None` if none is left.
pub(crate) fn next(
    name: &str,
    answers: &InputAnswers,
    client: Option<&ClientCapabilities>,
) -> Result<Option<InputRequiredResult>, ErrorData> {
    let Some(rounds) = value(ROUNDS)?.get_mut(name).map(Value::take) else { return Ok(None) };
    let rounds: Vec<InputRound> = serde_json::from_value(rounds).map_err(internal)?;
    let client = serde_json::to_value(client).map_err(internal)?;
    let Some(round) = rounds.get(answered(&rounds, answers, &client)?) else { return Ok(None) };
    let askable = round.askable(&client);
    if askable.is_empty() {
        let required = round.input_requests.values().map(|request| (needed(request).to_owned(), json!({}))).collect();
        let required = serde_json::from_value(Value::Object(required)).map_err(internal)?;
        return Err(ErrorData::missing_required_client_capability(required));
    }
    let mut asked = json!({"resultType": "input_required", "inputRequests": askable});
    if let Some(state) = &round.request_state {
        asked["requestState"] = json!(state);
    }
    deserialize(asked).map(Some)
}

fn answered(rounds: &[InputRound], answers: &InputAnswers, client: &Value) -> Result<usize, ErrorData> {
    let round = rounds.iter().position(|round| round.request_state == answers.state);
    match (round, &answers.responses) {
        (Some(at), Some(responses)) => {
            let is_answered = |key: &String| responses.get(key).is_some_and(Value::is_object);
            Ok(if rounds[at].askable(client).keys().all(is_answered) { at + 1 } else { at })
        }
        (Some(at), None) => Ok(at),
        (None, _) if answers.state.is_none() => Ok(0),
        (None, _) => Err(ErrorData::invalid_params("this server has given no such requestState", None)),
    }
}

/// Returns the client capability that the request requires.
fn needed(request: &Value) -> &str {
    request["method"].as_str().and_then(|method| method.split('/').next()).unwrap_or_default()
}
