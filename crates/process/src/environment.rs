//! Environment of a server: inherited and configured variables. Variables that make a program load or run other code are
//! never inherited; the configuration sets them within the rules of `model::variables`.

use std::collections::BTreeMap;
use std::ffi::OsString;

use mcp_satellite_actors::model::secret::Secret;
use mcp_satellite_actors::model::variables::{VariableScope, is_code_variable};

/// Error: a configured variable name is empty or contains `=`. The message does not contain the name: `NAME=value` in
/// place of a name is the likely mistake, and the value may be a secret. Such a name is rejected because `LD_PRELOAD=`
/// would bypass the rules for `LD_PRELOAD`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the name of an environment variable is empty or contains `=`: separate name and value")]
pub struct InvalidVariableName;

/// Returns the environment of a server without a sandbox: `inherited` without `withheld`, which are secrets of the
/// satellite, plus those of `variables` that the server gets in `scope`.
///
/// # Errors
///
/// Fails if a name in `variables` is empty or contains `=`.
pub fn environment(
    inherited: impl IntoIterator<Item = (OsString, OsString)>,
    withheld: &[String],
    variables: &BTreeMap<String, Secret>,
    scope: VariableScope<'_>,
) -> Result<BTreeMap<OsString, OsString>, InvalidVariableName> {
    let is_kept = |name: &str| !is_code_variable(name) && withheld.iter().all(|withheld| withheld != name);
    if variables.keys().any(|name| name.is_empty() || name.contains('=')) {
        return Err(InvalidVariableName);
    }

    let mut environment: BTreeMap<OsString, OsString> =
        inherited.into_iter().filter(|(name, _)| name.to_str().is_none_or(is_kept)).collect();
    let variables = variables.iter().filter(|(name, _)| scope.withheld(name).is_none());
    environment.extend(variables.map(|(name, value)| (name.into(), value.expose().into())));
    Ok(environment)
}

/// Returns the environment of a server in a sandbox: `PATH`, `HOME` and `LANG`, plus those of `variables` that the server
/// gets in `scope`.
///
/// # Errors
///
/// Fails if a name in `variables` is empty or contains `=`.
pub fn sandbox_environment(
    home: &str,
    lang: Option<OsString>,
    variables: &BTreeMap<String, Secret>,
    scope: VariableScope<'_>,
) -> Result<BTreeMap<OsString, OsString>, InvalidVariableName> {
    let lang = lang.unwrap_or_else(|| "C.UTF-8".into());
    let basic = [("PATH".into(), SANDBOX_PATH.into()), ("HOME".into(), home.into()), ("LANG".into(), lang)];
    environment(basic, &[], variables, scope)
}

pub const SANDBOX_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

#[cfg(test)]
mod tests {
    use super::*;

    const DEVELOPMENT: VariableScope<'_> = VariableScope { is_production: false, in_sandbox: false, allow_env: &[] };

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
        let configured = configured(&[("HOME", "/h"), ("KEY", "k")]);
        let environment = environment(inherited(&["PATH", "HOME"]), &[], &configured, DEVELOPMENT);
        assert_eq!(environment, Ok(variables(&[("HOME", "/h"), ("KEY", "k"), ("PATH", "inherited")])));
    }

    #[test]
    fn variables_that_run_other_code_are_never_inherited_and_configured_within_the_rules() {
        let names = ["BASH_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "NODE_OPTIONS", "NODE_PATH", "PYTHONPATH", "SHELL"];
        assert_eq!(environment(inherited(&names), &[], &configured(&[]), DEVELOPMENT), Ok(BTreeMap::new()));
        let wanted = configured(&names.map(|name| (name, "own")));
        let passed =
            |scope| environment(inherited(&names), &[], &wanted, scope).unwrap().into_keys().collect::<Vec<_>>();
        assert_eq!(passed(DEVELOPMENT), ["LD_LIBRARY_PATH", "NODE_OPTIONS", "NODE_PATH", "PYTHONPATH"]);
        let production = VariableScope { is_production: true, ..DEVELOPMENT };
        assert_eq!(passed(VariableScope { allow_env: &["NODE_PATH".to_owned()], ..production }), ["NODE_PATH"]);
        let environment =
            sandbox_environment("/h", None, &wanted, VariableScope { in_sandbox: true, ..DEVELOPMENT }).unwrap();
        let expected = ["HOME", "LANG", "NODE_OPTIONS", "NODE_PATH", "PATH", "PYTHONPATH"];
        assert_eq!(environment.into_keys().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn secrets_of_the_satellite_are_not_inherited_but_may_be_configured() {
        let withheld = ["ALICE_TOKEN".to_owned(), "API_KEY".to_owned()];
        let (inherited, configured) = (inherited(&["ALICE_TOKEN", "API_KEY"]), configured(&[("API_KEY", "own")]));
        let environment = environment(inherited, &withheld, &configured, DEVELOPMENT);
        assert_eq!(environment, Ok(variables(&[("API_KEY", "own")])));
    }

    #[test]
    fn an_invalid_name_is_rejected_and_not_shown() {
        for name in ["LD_PRELOAD=/evil.so:", "=", ""] {
            let refused = environment([], &[], &configured(&[(name, "x")]), DEVELOPMENT);
            assert_eq!(refused, Err(InvalidVariableName));
        }
        assert!(!InvalidVariableName.to_string().contains("evil"));
    }
}
