//! Import cycles between the files of a package. Imports are found by text: paths that begin with `crate`, `self`,
//! `super`, a child module or an imported module. A path through a re-export counts as an import of the original file.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;

use crate::architecture::{Source, sources};
use crate::{root, shown};

/// Number of files that may import each other.
const CYCLE_MAX: usize = 3;

/// Absolute path of a module or an item within its package.
type ItemPath = Vec<String>;

#[derive(Default)]
struct Module {
    file: String,
    tokens: Vec<String>,
    /// Paths of imported names by name, as written in `use`; `None` for names of other packages.
    imports: HashMap<String, Option<ItemPath>>,
}

struct Package(BTreeMap<ItemPath, Module>);

type Imports = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

#[derive(Debug, PartialEq)]
struct UsedPath {
    segments: Vec<String>,
    alias: String,
    is_use: bool,
    is_public: bool,
}

fn tokens(code: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
        let end = if is_word(first) {
            rest.find(|letter| !is_word(letter)).unwrap_or(rest.len())
        } else if rest.starts_with("::") || rest.starts_with("\"\"") {
            2
        } else if first == '"' {
            // A string contains no paths.
            let mut escaped = false;
            let closing = |letter: char| {
                let closes = letter == '"' && !escaped;
                escaped = letter == '\\' && !escaped;
                closes
            };
            rest[1..].find(closing).map_or(rest.len(), |at| at + 2)
        } else if rest.starts_with("'\"'") {
            3
        } else {
            first.len_utf8()
        };
        tokens.push(rest[..end].to_owned());
        rest = rest[end..].trim_start();
    }
    tokens
}

/// Reads the tree of paths that begins at `at` and appends its paths with their aliases. Returns the index after it.
fn read_tree(tokens: &[String], mut at: usize, prefix: &[String], into: &mut Vec<(Vec<String>, String)>) -> usize {
    let mut path = prefix.to_vec();
    let token = |at: usize| tokens.get(at).map_or("", String::as_str);
    loop {
        if token(at) == "{" {
            at += 1;
            while token(at) != "}" && at < tokens.len() {
                at = read_tree(tokens, at, &path, into);
                at += usize::from(token(at) == ",");
            }
            return at + 1;
        }
        let segment = token(at);
        let is_word = segment.starts_with(|letter: char| letter.is_alphabetic() || letter == '_');
        if !is_word && segment != "*" {
            break;
        }
        // `{self}` names the module itself.
        if segment != "self" || path.is_empty() {
            path.push(segment.to_owned());
        }
        at += 1;
        let continues = token(at) == "::"
            && (matches!(token(at + 1), "{" | "*")
                || token(at + 1).starts_with(|letter: char| letter.is_alphabetic() || letter == '_'));
        if !continues {
            break;
        }
        at += 1;
    }
    let alias = if token(at) == "as" {
        at += 2;
        token(at - 1).to_owned()
    } else {
        path.last().cloned().unwrap_or_default()
    };
    into.push((path, alias));
    at.max(1)
}

/// Returns all paths of a file: those of `use` declarations and those within code.
fn used_paths(tokens: &[String]) -> Vec<UsedPath> {
    let mut used = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let before = |back: usize| at.checked_sub(back).map_or("", |at| tokens[at].as_str());
        let is_use = tokens[at] == "use" && matches!(before(1), "" | ";" | "}" | "]" | "{" | "pub" | ")");
        let is_public = is_use && matches!(before(1), "pub" | ")");
        let begins_path = before(1) != "::" && before(1) != "." && tokens.get(at + 1).is_some_and(|next| next == "::");
        if !is_use && !begins_path {
            at += 1;
            continue;
        }
        let mut paths = Vec::new();
        let end = read_tree(tokens, at + usize::from(is_use), &[], &mut paths);
        used.extend(paths.into_iter().map(|(segments, alias)| UsedPath { segments, alias, is_use, is_public }));
        at = end.max(at + 1);
    }
    used
}

/// Returns the code of a file without comments, without items that only tests compile and without modules within the
/// file, whose `super` is the file itself.
fn product_code(source: &Source) -> String {
    let mut in_module = false;
    let lines = source.code().map(|(_, line)| line).filter(|line| {
        in_module |= line.contains("mod ") && !line.starts_with([' ', '/']) && line.ends_with('{');
        let skipped = in_module;
        in_module &= *line != "}";
        !skipped
    });
    lines.map(|line| line.split(" // ").next().unwrap_or(line)).collect::<Vec<_>>().join("\n")
}

/// Returns the names of the modules that only tests compile.
fn test_modules(text: &str) -> BTreeSet<String> {
    let mut modules = BTreeSet::new();
    let mut is_test = false;
    for line in text.lines() {
        is_test |= line.starts_with("#[cfg(test)]");
        if let Some((_, name)) = line.strip_suffix(';').and_then(|line| line.split_once("mod "))
            && is_test
        {
            modules.insert(name.to_owned());
        }
        is_test &= line.starts_with('#');
    }
    modules
}

impl Package {
    /// Reads the package with these files, given as the path below `src` and the text.
    fn new(files: impl IntoIterator<Item = (String, Source)>) -> Self {
        let mut modules = BTreeMap::new();
        let mut excluded = Vec::new();
        for (file, source) in files {
            let below = file.rsplit_once("src/").map_or(file.as_str(), |(_, below)| below);
            let mut path: ItemPath = below.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
            if path == ["main"] {
                continue;
            }
            path.pop_if(|last| *last == "mod" || *last == "lib");
            excluded.extend(test_modules(&source.text).into_iter().map(|name| [path.clone(), vec![name]].concat()));
            let tokens = tokens(&product_code(&source));
            modules.insert(path, Module { file, tokens, imports: HashMap::new() });
        }
        modules.retain(|path, _| !excluded.iter().any(|test| path.starts_with(test)));
        let mut package = Self(modules);
        for path in package.0.keys().cloned().collect::<Vec<_>>() {
            let used = used_paths(&package.0[&path].tokens);
            let imports = used.into_iter().filter(|used| used.is_use);
            let imports = imports.map(|used| (used.alias, package.absolute(&path, &used.segments, false))).collect();
            package.0.get_mut(&path).unwrap().imports = imports;
        }
        package
    }

    /// Returns the absolute form of a path that is used in `module`, or `None` if it leads to another package or is no
    /// path of a module.
    fn absolute(&self, module: &[String], segments: &[String], with_imports: bool) -> Option<ItemPath> {
        let mut base = module.to_vec();
        let mut rest = segments;
        match segments.first()?.as_str() {
            "crate" => (base, rest) = (Vec::new(), &segments[1..]),
            "self" => rest = &segments[1..],
            "super" => {
                while rest.first().is_some_and(|segment| segment == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            first => {
                if !self.0.contains_key(&[module, &[first.to_owned()]].concat()) {
                    let imported = self.0[module].imports.get(first).filter(|_| with_imports)?.clone()?;
                    // Only an imported module: a path through an imported type is not another import.
                    self.0.contains_key(&imported).then_some(())?;
                    (base, rest) = (imported, &segments[1..]);
                }
            }
        }
        Some([base, rest.to_vec()].concat())
    }

    /// Returns the module that declares an item, behind all re-exports, or `None` if it belongs to another package.
    fn declaring_module(&self, item: &[String], hops: usize) -> Option<(ItemPath, bool)> {
        let mut module = ItemPath::new();
        for (at, segment) in item.iter().enumerate() {
            let child = [module.clone(), vec![segment.clone()]].concat();
            if self.0.contains_key(&child) {
                module = child;
                continue;
            }
            return match self.0[&module].imports.get(segment) {
                Some(_) if hops == 0 => Some((module, false)),
                Some(Some(original)) => {
                    self.declaring_module(&[original.clone(), item[at + 1..].to_vec()].concat(), hops - 1)
                }
                Some(None) => None,
                None => Some((module, false)),
            };
        }
        Some((module, true))
    }

    /// Returns the names that each file imports, by file and imported file.
    fn imports(&self) -> Imports {
        let mut imports = Imports::new();
        for (path, module) in &self.0 {
            for used in used_paths(&module.tokens) {
                let Some(item) = self.absolute(path, &used.segments, !used.is_use) else { continue };
                let Some((declaring, is_module)) = self.declaring_module(&item, 8) else { continue };
                // A re-export alone is no use of the item, and an imported module counts where it is used.
                let mentions = module.tokens.iter().filter(|token| **token == used.alias).count();
                if declaring == *path || used.is_use && (is_module || used.is_public && mentions < 2) {
                    continue;
                }
                let file = self.0[&declaring].file.clone();
                imports.entry(module.file.clone()).or_default().entry(file).or_default().insert(used.alias);
            }
        }
        imports
    }
}

/// Returns the groups of files that import each other, directly or through other files of the group.
fn cycles(imports: &Imports) -> BTreeSet<BTreeSet<String>> {
    let reachable = |from: &String| {
        let mut seen = BTreeSet::new();
        let mut open = vec![from];
        while let Some(file) = open.pop() {
            for next in imports.get(file).into_iter().flat_map(BTreeMap::keys) {
                if seen.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&String, BTreeSet<String>> = imports.keys().map(|file| (file, reachable(file))).collect();
    let mut cycles = BTreeSet::new();
    for (file, there) in &reached {
        let cycle = there.iter().filter(|other| reached.get(other).is_some_and(|back| back.contains(*file)));
        cycles.insert(cycle.cloned().collect());
    }
    cycles
}

/// Describes the cycles with more than `max` files.
fn describe(imports: &Imports, max: usize) -> Vec<String> {
    let mut described = Vec::new();
    for cycle in cycles(imports).into_iter().filter(|cycle| cycle.len() > max) {
        described.push(format!("{} files import each other:", cycle.len()));
        for (from, to) in cycle.iter().flat_map(|from| imports[from].iter().map(move |to| (from, to))) {
            if cycle.contains(to.0) {
                let names: Vec<&str> = to.1.iter().map(String::as_str).collect();
                described.push(format!("  {from} -> {}: {}", to.0, names.join(", ")));
            }
        }
    }
    described
}

#[test]
fn no_import_cycle_has_more_than_three_files() {
    let mut directories = vec!["src".to_owned(), "actors/src".to_owned()];
    let members = fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().file_name());
    directories.extend(members.map(|member| format!("crates/{}/src", member.display())));
    directories.sort();
    let mut found = Vec::new();
    for directory in directories {
        let package = Package::new(sources(&directory).into_iter().map(|source| (shown(&source.path), source)));
        found.extend(describe(&package.imports(), CYCLE_MAX));
    }
    assert!(found.is_empty(), "move shared items to a file that imports none of these:\n{}", found.join("\n"));
}

fn package(files: &[(&str, &str)]) -> Package {
    let source = |text: &str| Source { path: std::path::PathBuf::new(), text: text.to_owned() };
    Package::new(files.iter().map(|(file, text)| (format!("src/{file}"), source(text))))
}

#[test]
fn a_cycle_is_found_through_uses_paths_and_child_modules() {
    let files = [
        ("lib.rs", "mod a;\nmod b;\nmod c;\n"),
        ("a.rs", "use crate::{\n    b::{self, Kind as Sort},\n    c,\n};\nfn call() { b::call(); }\n"),
        ("b.rs", "fn call() -> super::c::Size {}\n"),
        ("c/mod.rs", "mod d;\nfn call() { d::call(\"a::b\"); }\n"),
        ("c/d.rs", "use std::io;\nuse super::super::a;\nfn call() { a::call(); }\n"),
    ];
    let imports = package(&files).imports();
    assert_eq!(
        describe(&imports, 3),
        [
            "4 files import each other:",
            "  src/a.rs -> src/b.rs: Sort, call",
            "  src/b.rs -> src/c/mod.rs: Size",
            "  src/c/d.rs -> src/a.rs: call",
            "  src/c/mod.rs -> src/c/d.rs: call",
        ]
    );
    assert_eq!(describe(&imports, 4), [""; 0]);
}

#[test]
fn reexports_tests_and_other_packages_are_no_imports() {
    let files = [
        ("lib.rs", "mod a;\nmod b;\npub use a::Kind;\npub use other as c;\n"),
        ("a.rs", "mod own;\n#[cfg(test)]\nmod checks;\nuse crate::Size;\npub use own::Own;\nuse crate::c::Thing;\n"),
        ("a/own.rs", "// crate::b::Size\n#[cfg(test)]\nmod tests {\n    use super::super::*;\n}\n"),
        ("a/checks.rs", "use crate::a;\nfn call() { a::call(); }\n"),
        ("b.rs", "use crate::Kind;\nuse crate::a::Own;\nmod inner {\n    use super::Size;\n}\n"),
    ];
    let imports = package(&files).imports();
    let edges: Vec<_> = imports.iter().flat_map(|(from, to)| to.keys().map(move |to| format!("{from} {to}"))).collect();
    assert_eq!(edges, ["src/a.rs src/lib.rs", "src/b.rs src/a.rs", "src/b.rs src/a/own.rs"]);
}
