//! Environment variables that make a program load or run other code, and the conditions under which a server gets them.

use std::fmt;

/// Variables that make a program load or run other code. None is inherited, and no user can set one.
const CODE_VARIABLES: [(&str, CodeVariableRule); 12] = [
    ("LD_PRELOAD", CodeVariableRule::Never),
    ("LD_LIBRARY_PATH", CodeVariableRule::Unsandboxed),
    ("LD_AUDIT", CodeVariableRule::Never),
    ("LD_DEBUG", CodeVariableRule::Never),
    ("LD_PROFILE", CodeVariableRule::Never),
    ("NODE_OPTIONS", CodeVariableRule::Interpreter),
    ("NODE_PATH", CodeVariableRule::Interpreter),
    ("PYTHONSTARTUP", CodeVariableRule::Never),
    ("PYTHONPATH", CodeVariableRule::Interpreter),
    ("BASH_ENV", CodeVariableRule::Never),
    ("ENV", CodeVariableRule::Never),
    ("SHELL", CodeVariableRule::Never),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CodeVariableRule {
    Never,
    /// In production only with permission, and never in a sandbox.
    Unsandboxed,
    /// In production only with permission.
    Interpreter,
}

/// Circumstances of a start that decide which variables of the configuration a server gets.
#[derive(Debug, Clone, Copy)]
pub struct VariableScope<'a> {
    /// True in the production profile.
    pub is_production: bool,
    /// True if the server runs in a sandbox.
    pub in_sandbox: bool,
    /// Permissions of the policy: `isolation.allow_env`.
    pub allow_env: &'a [String],
}

/// Reason why a variable of the configuration is not passed on to a server. The display form follows the variable's
/// name and contains the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithheldReason {
    /// No configuration permits the variable.
    Never,
    /// The server runs in a sandbox.
    Sandbox,
    /// The profile is production, and the policy does not permit the variable.
    NotAllowed,
}

impl fmt::Display for WithheldReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Never => "is never passed on to a server; remove it",
            Self::Sandbox => "is not passed on in a sandbox; remove it, or set it in a script that is the command",
            Self::NotAllowed => {
                "is not passed on in the production profile; list it in `allow_env` under [policy.isolation]"
            }
        })
    }
}

fn rule(name: &str) -> Option<CodeVariableRule> {
    CODE_VARIABLES.iter().find(|(known, _)| *known == name).map(|(_, rule)| *rule)
}

/// Returns true if the variable makes a program load or run other code.
pub fn is_code_variable(name: &str) -> bool {
    rule(name).is_some()
}

/// Returns true if no configuration passes the variable on.
pub fn is_never_passed(name: &str) -> bool {
    rule(name) == Some(CodeVariableRule::Never)
}

/// Returns the variables that `isolation.allow_env` can permit.
pub fn permissible_variables() -> impl Iterator<Item = &'static str> {
    CODE_VARIABLES.iter().filter(|(_, rule)| *rule != CodeVariableRule::Never).map(|(name, _)| *name)
}

impl VariableScope<'_> {
    /// Returns the reason why a server does not get a variable of its configuration, or `None` if it gets it.
    pub fn withheld(&self, name: &str) -> Option<WithheldReason> {
        match rule(name)? {
            CodeVariableRule::Never => Some(WithheldReason::Never),
            CodeVariableRule::Unsandboxed if self.in_sandbox => Some(WithheldReason::Sandbox),
            CodeVariableRule::Unsandboxed | CodeVariableRule::Interpreter => {
                let is_permitted = !self.is_production || self.allow_env.iter().any(|allowed| allowed == name);
                (!is_permitted).then_some(WithheldReason::NotAllowed)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profile_sandbox_and_permission_decide_which_variables_a_server_gets() {
        let withheld = |is_production, in_sandbox, allow_env: &[&str], name| {
            let allow_env: Vec<String> = allow_env.iter().map(|name| (*name).to_owned()).collect();
            VariableScope { is_production, in_sandbox, allow_env: &allow_env }.withheld(name)
        };
        let every: Vec<&str> = CODE_VARIABLES.iter().map(|(name, _)| *name).collect();
        for in_sandbox in [false, true] {
            for name in ["PYTHONPATH", "NODE_PATH", "NODE_OPTIONS"] {
                assert_eq!(withheld(false, in_sandbox, &[], name), None);
                assert_eq!(withheld(true, in_sandbox, &["PATH"], name), Some(WithheldReason::NotAllowed));
                assert_eq!(withheld(true, in_sandbox, &["PATH", name], name), None);
            }
            for name in ["LD_PRELOAD", "LD_AUDIT", "LD_DEBUG", "LD_PROFILE", "BASH_ENV", "ENV", "SHELL"] {
                assert_eq!(withheld(false, in_sandbox, &every, name), Some(WithheldReason::Never));
                assert_eq!(withheld(true, in_sandbox, &every, name), Some(WithheldReason::Never));
            }
            for name in ["PATH", "API_KEY", "GLIBC_TUNABLES", "pythonpath"] {
                assert_eq!(withheld(true, in_sandbox, &[], name), None);
            }
            assert_eq!(
                withheld(false, in_sandbox, &every, "LD_LIBRARY_PATH"),
                in_sandbox.then_some(WithheldReason::Sandbox)
            );
        }
        assert_eq!(withheld(true, false, &[], "LD_LIBRARY_PATH"), Some(WithheldReason::NotAllowed));
        assert_eq!(withheld(true, false, &every, "LD_LIBRARY_PATH"), None);
        let permissible: Vec<&str> = permissible_variables().collect();
        assert_eq!(permissible, ["LD_LIBRARY_PATH", "NODE_OPTIONS", "NODE_PATH", "PYTHONPATH"]);
    }
}
