//! Queries as text. Shared parameters are structs that several queries flatten; `serde` passes their values on as text.

use std::fmt::Display;
use std::str::FromStr;

use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize as _, Deserializer};

/// Reads a query.
///
/// # Errors
/// A parameter is unknown, or its value has another form.
pub(crate) fn read_query<Q: DeserializeOwned>(query: &str) -> Result<Q, serde_urlencoded::de::Error> {
    serde_urlencoded::from_str(query)
}

/// Reads a query that the form of a page may have sent: with an empty value for each field that is not used.
///
/// # Errors
/// See [`read_query`].
pub(crate) fn read_form_query<Q: DeserializeOwned>(query: &str) -> Result<Q, serde_urlencoded::de::Error> {
    let is_empty = |pair: &str| pair.split_once('=').is_none_or(|(_, value)| value.is_empty());
    let given: Vec<&str> = query.split('&').filter(|pair| !is_empty(pair)).collect();
    read_query(&given.join("&"))
}

/// Reads a flattened number or truth value.
pub(crate) fn parsed<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(value: D) -> Result<T, D::Error> {
    String::deserialize(value)?.parse().map_err(D::Error::custom)
}

/// Reads an optional flattened number or truth value that is present.
pub(crate) fn parsed_some<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
    value: D,
) -> Result<Option<T>, D::Error> {
    parsed(value).map(Some)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;
    use crate::v1::{CallQuery, FleetStreamQuery, InstanceStreamQuery};

    #[test]
    fn shared_parameters_are_read_and_unknown_ones_rejected() {
        let query: CallQuery = read_query("team=acme&tool=echo&limit=5&success=true").unwrap();
        let limits = (query.conditions.limit, query.conditions.success);
        assert_eq!((query.subject.team.as_deref(), query.conditions.tool.as_deref()), (Some("acme"), Some("echo")));
        assert_eq!(limits, (Some(5), Some(true)));
        assert!(read_query::<CallQuery>("").unwrap().conditions.limit.is_none());
        for wrong in ["what=1", "limit=x", "success=maybe", "satellite=one"] {
            assert!(read_query::<CallQuery>(wrong).is_err(), "{wrong}");
        }
        let query: InstanceStreamQuery = read_query("events=true&since=7&team=acme").unwrap();
        assert!(query.stream.rows && query.stream.events && !query.stream.once);
        assert_eq!((query.stream.since, query.team.as_deref()), (Some(7), Some("acme")));
        assert!(!read_query::<FleetStreamQuery>("rows=false").unwrap().stream.rows);
        assert!(read_query::<FleetStreamQuery>("team=acme").is_err());
    }

    #[test]
    fn a_form_does_not_filter_by_its_empty_fields() {
        let query: CallQuery = read_form_query("team=&tool=a%3Db&success=&&limit=2").unwrap();
        assert_eq!((query.subject.team, query.conditions.success), (None, None));
        assert_eq!((query.conditions.tool.as_deref(), query.conditions.limit), (Some("a=b"), Some(2)));
    }
}
