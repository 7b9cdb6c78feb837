//! The texts that a plan was built from, and the contents of the files that they refer to. When such a file changes,
//! the same texts are resolved again (`parse`). Changes of the configuration itself require a reload.

use std::collections::BTreeMap;
use std::path::PathBuf;

use mcp_satellite_model::secret::Secret;

use super::plan::{Plan, PlanRestrictions};
use super::secret_files::{SecretFileChange, SecretFiles};

#[derive(Debug, Clone, Default)]
pub struct ConfigOrigin {
    pub(crate) documents: Vec<ConfigDocument>,
    pub(crate) environment: BTreeMap<String, Secret>,
    pub(crate) files: SecretFiles,
    /// Settings that options of the command line replace, each with its path.
    pub(crate) overrides: Vec<(&'static str, String)>,
    /// Changes that cannot be used; they are tried again with later changes.
    rejected: Vec<SecretFileChange>,
}

#[derive(Debug, Clone)]
pub(crate) struct ConfigDocument {
    pub(crate) name: String,
    pub(crate) text: Secret,
    pub(crate) kind: ConfigDocumentKind,
}

#[derive(Debug, Clone)]
pub(crate) enum ConfigDocumentKind {
    Toml,
    McpJson(Box<PlanRestrictions>),
    Document(Box<PlanRestrictions>),
}

#[derive(Debug, Default)]
pub struct SecretFilesUpdate {
    pub plan: Option<Plan>,
    pub changed: Vec<PathBuf>,
    /// Files whose previous content stays in use, each with the reason. Each is reported once.
    pub unusable: Vec<(PathBuf, String)>,
}

impl ConfigOrigin {
    /// Returns the name of the configuration file in TOML; `None` if there is none.
    pub fn main_file(&self) -> Option<&str> {
        self.documents.iter().find(|document| matches!(document.kind, ConfigDocumentKind::Toml)).map(|it| &*it.name)
    }

    pub(crate) fn new(
        name: &str,
        text: &str,
        kind: ConfigDocumentKind,
        environment: BTreeMap<String, Secret>,
        files: SecretFiles,
    ) -> Self {
        let document = ConfigDocument { name: name.to_owned(), text: text.into(), kind };
        Self { documents: vec![document], environment, files, overrides: Vec::new(), rejected: Vec::new() }
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.documents.extend(other.documents);
        self.environment.extend(other.environment);
        self.files.entries.extend(other.files.entries);
        self.overrides.extend(other.overrides);
    }

    pub fn has_secret_files(&self) -> bool {
        !self.files.entries.is_empty()
    }

    /// Reads the files that changed. A file that is missing, empty, unreadable or unusable keeps its previous content.
    /// Blocks on the file system.
    pub fn poll_files(&mut self) -> SecretFilesUpdate {
        let mut look = SecretFilesUpdate::default();
        let changes = self.files.poll_changes(&mut look.unusable);
        if changes.is_empty() {
            return look;
        }
        let mut refused = std::mem::take(&mut self.rejected);
        refused.retain(|change| self.files.is_current(change));
        self.apply_changes(changes, &mut look, &mut refused);
        self.rejected = self.apply_jointly(refused, &mut look);
        self.rejected.sort_by(|one, other| one.path.cmp(&other.path));
        for change in self.rejected.iter_mut().filter(|change| !change.reported) {
            change.reported = true;
            look.unusable.push((change.path.clone(), change.errors.join("; ")));
        }
        look
    }

    /// Applies the changes all at once, because each attempt resolves all texts again. After a failure it tries each
    /// half by itself, recursively, so that an unusable file does not block the others.
    fn apply_changes(
        &mut self,
        mut changes: Vec<SecretFileChange>,
        look: &mut SecretFilesUpdate,
        refused: &mut Vec<SecretFileChange>,
    ) {
        if changes.is_empty() {
            return;
        }
        let Err(errors) = self.try_apply(&mut changes, look) else { return };
        let mut second = changes.split_off(changes.len() / 2);
        if let ([], [change]) = (&changes[..], &mut second[..]) {
            change.errors = errors;
            refused.append(&mut second);
            return;
        }
        self.apply_changes(changes, look, refused);
        self.apply_changes(second, look, refused);
    }

    /// Applies changes that failed on their own but may work together, such as tokens that two users exchange. A change
    /// whose errors are not among those of all changes together is not their cause. Returns the changes that remain
    /// refused.
    fn apply_jointly(
        &mut self,
        mut changes: Vec<SecretFileChange>,
        look: &mut SecretFilesUpdate,
    ) -> Vec<SecretFileChange> {
        let mut refused = Vec::new();
        while !changes.is_empty() {
            let Err(errors) = self.try_apply(&mut changes, look) else { return refused };
            let is_reason = |change: &SecretFileChange| change.errors.iter().any(|error| errors.contains(error));
            let (reasons, others): (Vec<_>, Vec<_>) = changes.into_iter().partition(is_reason);
            changes = others;
            if reasons.is_empty() {
                break;
            }
            refused.extend(reasons);
        }
        refused.extend(changes);
        refused
    }

    fn try_apply(
        &mut self,
        changes: &mut Vec<SecretFileChange>,
        look: &mut SecretFilesUpdate,
    ) -> Result<(), Vec<String>> {
        self.swap_texts(changes);
        match self.resolve() {
            Ok(plan) => {
                look.plan = Some(plan);
                look.changed.extend(changes.drain(..).map(|change| change.path));
                Ok(())
            }
            Err(errors) => {
                self.swap_texts(changes);
                let items = errors.items().into_iter();
                Err(items.map(|item| format!("{}:{}: {}", item.file, item.line, item.message)).collect())
            }
        }
    }

    fn swap_texts(&mut self, changes: &mut [SecretFileChange]) {
        for SecretFileChange { path, text, .. } in changes {
            if let Some(known) = self.files.entries.get_mut(path) {
                std::mem::swap(&mut known.text, text);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::fs;
    use std::path::Path;

    use mcp_satellite_model::spec::{InstanceConfig, InstanceSpec};

    use super::*;

    const TEXT: &str = r#"
[[teams]]
id = "t"
slug = "t"
users = [{ id = "u", slug = "u" }]
[[teams.installations]]
id = "a"
server = "a"
transport = "http"
url = "https://e.com/mcp"
bearer_token = "file:secrets/a"
[[teams.installations]]
id = "b"
server = "b"
transport = "sse"
url = "https://e.com/sse"
headers = { Cookie = "file:secrets/b", X = "env:VARIABLE" }
[[teams.installations]]
id = "c"
server = "c"
command = "c"
env = { KEY = "file:secrets/c" }
"#;

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn new() -> Self {
            let folder = Self(tempfile::tempdir().unwrap());
            fs::create_dir(folder.0.path().join("secrets")).unwrap();
            for name in ["a", "b", "c"] {
                folder.write(name, &format!("{name}-first\n"));
            }
            folder
        }

        fn secret(&self, name: &str) -> PathBuf {
            self.0.path().join("secrets").join(name)
        }

        fn write(&self, name: &str, text: &str) {
            fs::write(self.secret(name), text).unwrap();
        }

        fn plan(&self) -> Plan {
            let name = self.0.path().join("satellite.toml");
            let variable = |name: &str| (name == "VARIABLE").then(|| "hush".to_owned());
            super::super::parse(name.to_str().unwrap(), TEXT, &variable).unwrap()
        }
    }

    fn values(plan: Plan) -> Vec<String> {
        let of = |spec: InstanceSpec| {
            let values = spec.env.into_values().chain(spec.headers.into_values());
            values.map(|value| value.expose().to_owned()).collect::<Vec<_>>()
        };
        plan.instances.into_iter().map(InstanceConfig::merge).flat_map(of).collect()
    }

    fn poll_twice(origin: &mut ConfigOrigin) -> SecretFilesUpdate {
        let first = origin.poll_files();
        assert!(
            first.plan.is_none() && first.unusable.is_empty(),
            "a file that is being written is not read: {first:?}"
        );
        origin.poll_files()
    }

    #[test]
    fn a_changed_secret_file_updates_only_its_value() {
        let folder = Folder::new();
        let plan = folder.plan();
        let mut origin = plan.origin.clone();
        assert_eq!(values(plan), ["Bearer a-first", "b-first", "hush", "c-first"]);
        assert!(origin.has_secret_files() && poll_twice(&mut origin).plan.is_none());

        folder.write("b", "b-second");
        let look = poll_twice(&mut origin);
        assert_eq!((look.changed, look.unusable.len()), (vec![folder.secret("b")], 0));
        assert_eq!(values(look.plan.unwrap()), ["Bearer a-first", "b-second", "hush", "c-first"]);
        assert!(poll_twice(&mut origin).plan.is_none(), "a change is reported once");
    }

    #[test]
    fn a_file_replaced_behind_a_symbolic_link_is_detected() {
        let folder = Folder::new();
        let link = |target: &str| {
            let fresh = folder.secret("fresh");
            std::os::unix::fs::symlink(folder.secret(target), &fresh).unwrap();
            fs::rename(fresh, folder.secret("a")).unwrap();
        };
        folder.write("one", "of-1");
        folder.write("two", "of-2");
        link("one");
        let plan = folder.plan();
        let mut origin = plan.origin.clone();
        link("two");
        assert_eq!(values(poll_twice(&mut origin).plan.unwrap())[0], "Bearer of-2");
    }

    #[test]
    fn a_change_between_loading_and_the_first_poll_is_detected() {
        let folder = Folder::new();
        let mut origin = folder.plan().origin;
        folder.write("a", "a-other");
        assert_eq!(values(poll_twice(&mut origin).plan.unwrap())[0], "Bearer a-other");
    }

    #[test]
    fn a_missing_or_empty_file_keeps_its_value_and_is_reported_once() {
        let folder = Folder::new();
        let mut origin = folder.plan().origin;
        for spoil in [|path: &Path| fs::remove_file(path).unwrap(), |path: &Path| fs::write(path, "").unwrap()] {
            spoil(&folder.secret("a"));
            let look = poll_twice(&mut origin);
            assert!(matches!(&look.unusable[..], [(file, _)] if *file == folder.secret("a")), "{look:?}");
            let more = poll_twice(&mut origin);
            assert!(look.plan.is_none() && more.plan.is_none() && more.unusable.is_empty(), "{more:?}");

            let fresh = format!("a-after-{}", look.unusable[0].1);
            folder.write("a", &fresh);
            assert_eq!(values(poll_twice(&mut origin).plan.unwrap())[0], format!("Bearer {fresh}"));
        }
    }

    #[test]
    fn an_unusable_file_keeps_its_value_and_does_not_block_other_files() {
        let folder = Folder::new();
        let mut origin = folder.plan().origin;
        folder.write("a", "two\nlines");
        folder.write("b", "b-second");
        let look = poll_twice(&mut origin);
        assert_eq!(values(look.plan.unwrap()), ["Bearer a-first", "b-second", "hush", "c-first"]);
        let [(file, why)] = &look.unusable[..] else { panic!("{:?}", look.unusable) };
        assert!(*file == folder.secret("a") && why.contains("cannot be sent") && !why.contains("lines\""), "{why}");
        assert!(poll_twice(&mut origin).unusable.is_empty());
    }

    #[test]
    fn of_many_changed_files_only_unusable_ones_keep_their_values() {
        let folder = Folder::new();
        let names: Vec<String> = (0..20).map(|at| format!("n{at:02}")).collect();
        let installation = |name: &String| {
            folder.write(name, "first");
            format!(
                "[[teams.installations]]\nid = \"{name}\"\nserver = \"s\"\ntransport = \"http\"\n\
                 url = \"https://e.com/mcp\"\nheaders = {{ X = \"file:secrets/{name}\" }}\n"
            )
        };
        let team = "[[teams]]\nid = \"t\"\nslug = \"t\"\nusers = [{ id = \"u\", slug = \"u\" }]\n".to_owned();
        let text = names.iter().map(installation).fold(team, |text, more| text + &more);
        let file = folder.0.path().join("satellite.toml");
        let mut origin = super::super::parse(file.to_str().unwrap(), &text, &|_| None).unwrap().origin;
        let bad = ["n00", "n07", "n08", "n19"];
        for name in &names {
            folder.write(name, if bad.contains(&name.as_str()) { "two\nlines" } else { "second" });
        }
        let look = poll_twice(&mut origin);
        let unusable: Vec<_> = look.unusable.into_iter().map(|(path, _)| path).collect();
        assert_eq!(unusable, bad.map(|name| folder.secret(name)));
        assert_eq!(look.changed.len(), 16);
        let wanted: Vec<_> =
            names.iter().map(|name| if bad.contains(&name.as_str()) { "first" } else { "second" }).collect();
        assert_eq!(values(look.plan.unwrap()), wanted);
    }

    fn users(folder: &Folder) -> ConfigOrigin {
        let text = "[[teams]]\nid = \"t\"\nslug = \"t\"\nusers = [\n\
                    { id = \"u\", slug = \"u\", token = \"file:secrets/a\" },\n\
                    { id = \"v\", slug = \"v\", token = \"file:secrets/b\" }]\n\
                    [[teams.installations]]\nid = \"c\"\nserver = \"c\"\ntransport = \"http\"\n\
                    url = \"https://e.com/mcp\"\nheaders = { X = \"file:secrets/c\" }\n";
        let file = folder.0.path().join("satellite.toml");
        super::super::parse(file.to_str().unwrap(), text, &|_| None).unwrap().origin
    }

    #[test]
    fn tokens_swapped_between_two_users_are_applied_together() {
        let folder = Folder::new();
        let mut origin = users(&folder);
        folder.write("a", "b-first\n");
        folder.write("b", "a-first\n");
        let look = poll_twice(&mut origin);
        assert_eq!((look.changed.len(), look.unusable), (2, vec![]));
    }

    #[test]
    fn swapped_tokens_are_applied_despite_another_unusable_file() {
        let folder = Folder::new();
        let mut origin = users(&folder);
        folder.write("a", "b-first");
        folder.write("b", "a-first");
        folder.write("c", "two\nlines");
        let look = poll_twice(&mut origin);
        assert_eq!(look.changed, ["a", "b"].map(|name| folder.secret(name)));
        assert!(matches!(&look.unusable[..], [(file, _)] if *file == folder.secret("c")), "{:?}", look.unusable);
        assert!(look.plan.is_some());
    }

    #[test]
    fn a_token_of_another_user_is_rejected_until_that_user_changes() {
        let folder = Folder::new();
        let mut origin = users(&folder);
        folder.write("a", "b-first");
        let look = poll_twice(&mut origin);
        assert!(look.plan.is_none() && look.unusable.len() == 1, "{look:?}");
        folder.write("b", "b-second");
        let look = poll_twice(&mut origin);
        assert_eq!((look.changed.len(), look.unusable), (2, vec![]));
        let look = poll_twice(&mut origin);
        assert!(look.plan.is_none() && look.unusable.is_empty());

        // A refused change is forgotten when the file changes again.
        folder.write("a", "b-second");
        assert_eq!(poll_twice(&mut origin).unusable.len(), 1);
        folder.write("a", "b-first");
        assert!(poll_twice(&mut origin).plan.is_none());
        folder.write("b", "b-third");
        assert_eq!(poll_twice(&mut origin).changed, [folder.secret("b")]);
    }

    #[test]
    fn a_continuously_written_file_is_applied_from_time_to_time() {
        let folder = Folder::new();
        let mut origin = folder.plan().origin;
        let mut looks = (1..=12).map(|at| {
            // Each text has another size, because the clock may not advance between two writes.
            folder.write("a", &"x".repeat(at));
            origin.poll_files().plan.map(|plan| values(plan)[0].len())
        });
        let bearer = "Bearer ".len();
        let taken: Vec<_> = looks.by_ref().flatten().collect();
        assert_eq!(taken, [bearer + 4, bearer + 8, bearer + 12]);
        folder.write("a", "at-rest");
        assert_eq!(values(poll_twice(&mut origin).plan.unwrap())[0], "Bearer at-rest");
    }

    #[test]
    fn values_of_both_configuration_files_are_updated_and_never_shown() {
        let folder = Folder::new();
        let name = folder.0.path().join("mcp.json");
        let json = r#"{"mcpServers": {"x": {"command": "x", "env": {"KEY": "file:secrets/a"}}}}"#;
        let json = super::super::parse_mcp_json(name.to_str().unwrap(), json, &PlanRestrictions::default(), &|_| None)
            .unwrap();
        let plan = folder.plan().merge(json).unwrap();
        let shown = format!("{plan:?}");
        let mut origin = plan.origin;
        folder.write("a", "a-second");
        let look = poll_twice(&mut origin);
        assert_eq!(values(look.plan.unwrap()), ["Bearer a-second", "b-first", "hush", "c-first", "a-second"]);
        assert!(!shown.contains("first") && !shown.contains("hush"), "{shown}");
    }
}
