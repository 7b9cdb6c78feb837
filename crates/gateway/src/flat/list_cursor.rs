//! Positions in a merged list, and the cursors that stand for them.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use mcp_satellite_actors::model::catalogue::ListKind;
use mcp_satellite_actors::model::ids::InstallationId;

use crate::tools::raw::to_json;

/// An entry of a merged list, as a position: its server and the server's own name for it. An index would not do,
/// because the list may change between two pages: entries before the position would be repeated or left out.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ListPosition {
    pub installation: InstallationId,
    /// Name or URI on the server.
    pub key: Box<str>,
}

impl ListPosition {
    pub fn to_cursor(&self, list: ListKind) -> String {
        URL_SAFE_NO_PAD.encode(to_json(&(list.method(), &self.installation, &self.key)))
    }

    /// Reads a cursor of this list. `None` if it is invalid.
    pub fn from_cursor(cursor: &str, list: ListKind) -> Option<Self> {
        let text = URL_SAFE_NO_PAD.decode(cursor).ok()?;
        let (method, installation, key): (Box<str>, InstallationId, Box<str>) = serde_json::from_slice(&text).ok()?;
        (*method == *list.method()).then_some(Self { installation, key })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_cursor_is_valid_for_its_list_only(installation in any::<String>(), key in any::<String>()) {
            let position = ListPosition { installation: installation.into(), key: key.into() };
            let cursor = position.to_cursor(ListKind::Tools);
            prop_assert!(cursor.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-')));
            prop_assert_eq!(ListPosition::from_cursor(&cursor, ListKind::Tools), Some(position));
            prop_assert_eq!(ListPosition::from_cursor(&cursor, ListKind::Prompts), None);
            prop_assert_eq!(ListPosition::from_cursor(&cursor[1..], ListKind::Tools), None);
        }

        #[test]
        fn any_text_can_be_sent_as_a_cursor(text in any::<String>()) {
            prop_assert_eq!(ListPosition::from_cursor(&text, ListKind::Tools), None);
        }
    }
}
