//! Environment of a child process: inherited, configured and denied variables.

use std::collections::BTreeMap;
use std::ffi::OsString;

use mcp_satellite_actors::model::secret::Secret;

pub use mcp_satellite_actors::model::spec::DENIED_VARIABLES as DENIED;

/// Error: a configured variable name is empty or contains `=`. The message does not contain the name: `NAME=value` in
/// place of a name is the likely mistake, and the value may be a secret. Such a name is rejected because `LD_PRELOAD=`
/// would bypass the list of denied names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the name of an environment variable is empty or contains `=`: separate name and value")]
pub struct InvalidVariableName;

/// Returns the environment of a child without a sandbox: `inherited` without the denied names and without `withheld`,
/// which are secrets of the satellite, plus `variables` without the denied names.
///
/// # Errors
///
/// Fails if a name in `variables` is empty or contains `=`.
pub fn environment(
    inherited: impl IntoIterator<Item = (OsString, OsString)>,
    withheld: &[String],
    variables: &BTreeMap<String, Secret>,
) -> Result<BTreeMap<OsString, OsString>, InvalidVariableName> {
    let denied = |name: &str| DENIED.contains(&name);
    if variables.keys().any(|name| name.is_empty() || name.contains('=')) {
        return Err(InvalidVariableName);
    }

    let mut environment: BTreeMap<OsString, OsString> = inherited
        .into_iter()
        .filter(|(name, _)| !name.to_str().is_some_and(|name| denied(name) || withheld.iter().any(|w| w == name)))
        .collect();
    let variables = variables.iter().filter(|(name, _)| !denied(name));
    environment.extend(variables.map(|(name, value)| (name.into(), value.expose().into())));
    Ok(environment)
}

/// Returns the environment of a child in a sandbox: `PATH`, `HOME` and `LANG`, plus `variables` without the denied
/// names.
///
/// # Errors
///
/// Fails if a name in `variables` is empty or contains `=`.
pub fn sandbox_environment(
    home: &str,
    lang: Option<OsString>,
    variables: &BTreeMap<String, Secret>,
) -> Result<BTreeMap<OsString, OsString>, InvalidVariableName> {
    let lang = lang.unwrap_or_else(|| "C.UTF-8".into());
    let basic = [("PATH".into(), SANDBOX_PATH.into()), ("HOME".into(), home.into()), ("LANG".into(), lang)];
    environment(basic, &[], variables)
}

pub const SANDBOX_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

#[cfg(test)]
mod tests {
    use super::*;

    fn inherited(names: &[&str]) -> Vec<(OsString, OsString)> {
        names.iter().map(|name| (name.into(), "inherited".into())).collect()
    }

    fn configured(pairs: &[(&str, &str)]) -> BTreeMap<String, Secret> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), Secret::from(*value))).collect()
    }

    fn variables(pairs: &[(&str, &str)]) -> BTreeMap<OsString, OsString> {
        pairs.iter().map(|(name, value)| (name.into(), value.into())).collect()
    }

    #[test]
    fn a_configured_variable_overrides_an_inherited_one() {
        let environment = environment(inherited(&["PATH", "HOME"]), &[], &configured(&[("HOME", "/h"), ("KEY", "k")]));
        assert_eq!(environment, Ok(variables(&[("HOME", "/h"), ("KEY", "k"), ("PATH", "inherited")])));
    }

    #[test]
    fn denied_names_are_neither_inherited_nor_configured() {
        let wanted: Vec<_> = DENIED.iter().map(|name| (*name, "x")).collect();
        assert_eq!(environment(inherited(&DENIED), &[], &configured(&wanted)), Ok(BTreeMap::new()));
    }

    #[test]
    fn secrets_of_the_satellite_are_not_inherited_but_may_be_configured() {
        let withheld = ["ALICE_TOKEN".to_owned(), "API_KEY".to_owned()];
        let environment =
            environment(inherited(&["ALICE_TOKEN", "API_KEY"]), &withheld, &configured(&[("API_KEY", "own")]));
        assert_eq!(environment, Ok(variables(&[("API_KEY", "own")])));
    }

    #[test]
    fn an_invalid_name_is_rejected_and_not_shown() {
        for name in ["LD_PRELOAD=/evil.so:", "=", ""] {
            let refused = environment([], &[], &configured(&[(name, "x")]));
            assert_eq!(refused, Err(InvalidVariableName));
        }
        assert!(!InvalidVariableName.to_string().contains("evil"));
    }
}
