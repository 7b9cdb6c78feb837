//! Names of a caller's servers, and of their tools in one list of all. A name never depends on an order: if two things
//! would get the same name, both get a longer one.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Write as _;

use ring::digest::{SHA256, digest};

// Maximum length of a tool name that every client accepts, in characters.
const FLAT_MAX: usize = 64;
/// Number of characters at the beginning of a shortest name that no digest replaces.
pub const PREFIX_MAX: usize = FLAT_MAX - "_".len() - 8;

/// The names by which a caller can refer to one of its servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerNames<'a> {
    /// Server slug; not unique, because a caller may have two installations of one server.
    pub server: &'a str,
    pub installation: &'a str,
    pub full: &'a str,
}

impl ServerNames<'_> {
    fn slug_with_installation(&self) -> String {
        format!("{}-{}", self.server, self.installation)
    }

    pub fn has_name(&self, text: &str) -> bool {
        let rest = || text.strip_prefix(self.server).and_then(|rest| rest.strip_prefix('-'));
        self.full == text || self.server == text || rest() == Some(self.installation)
    }
}

/// Returns the shortest unique label of each server: its slug, else `slug-installation`, else its full name.
pub fn labels(own: &[ServerNames<'_>]) -> Vec<String> {
    let mut times: HashMap<String, usize> = HashMap::new();
    for names in own {
        // Two equal names of one server count once.
        let all = HashSet::from([names.server.to_owned(), names.slug_with_installation(), names.full.to_owned()]);
        for name in all {
            *times.entry(name).or_default() += 1;
        }
    }
    let label = |names: &ServerNames<'_>| {
        let short = [names.server.to_owned(), names.slug_with_installation()];
        short.into_iter().find(|name| times.get(name) == Some(&1)).unwrap_or_else(|| names.full.to_owned())
    };
    own.iter().map(label).collect()
}

/// Result of a lookup: positions among the caller's servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NameLookup {
    One(usize),
    Several(Vec<usize>),
    None,
}

#[derive(Debug)]
pub struct ServerNameIndex {
    by_name: HashMap<Box<str>, NameLookup>,
    // Length of the longest name in bytes: a longer text cannot be a name.
    longest: usize,
}

impl ServerNameIndex {
    pub fn new(own: &[ServerNames<'_>]) -> Self {
        let mut by_name: HashMap<Box<str>, NameLookup> = HashMap::new();
        for (at, names) in own.iter().enumerate() {
            for name in [names.server.to_owned(), names.slug_with_installation()] {
                let known = by_name.entry(name.into()).or_insert(NameLookup::None);
                *known = match std::mem::replace(known, NameLookup::None) {
                    NameLookup::None => NameLookup::One(at),
                    NameLookup::One(other) => NameLookup::Several(vec![other, at]),
                    NameLookup::Several(others) => NameLookup::Several([others, vec![at]].concat()),
                };
            }
        }
        // A full name always refers to its server, even if it equals a shorter name of another.
        by_name.extend(own.iter().enumerate().map(|(at, names)| (names.full.into(), NameLookup::One(at))));
        let longest = by_name.keys().map(|name| name.len()).max().unwrap_or_default();
        Self { by_name, longest }
    }

    pub fn find(&self, text: &str) -> &NameLookup {
        self.by_name.get(text).unwrap_or(&NameLookup::None)
    }

    /// Splits `server:tool` or `server|uri` at the first separator that follows a known name, else at the first
    /// separator. Returns the lookup, the name and the rest; `None` if there is no separator.
    pub fn split<'t>(&self, text: &'t str, separator: char) -> Option<(&NameLookup, &'t str, &'t str)> {
        let mut unknown = None;
        for (at, _) in text.match_indices(separator) {
            let (label, rest) = (&text[..at], &text[at + separator.len_utf8()..]);
            match self.find(label) {
                NameLookup::None => unknown = unknown.or(Some((&NameLookup::None, label, rest))),
                found => return Some((found, label, rest)),
            }
            if at > self.longest {
                break;
            }
        }
        unknown
    }
}

pub fn flat_prefix(label: &str) -> String {
    label.chars().map(to_legal).chain("__".chars()).collect()
}

/// A tool or prompt in one list of all.
#[derive(Debug, Clone, Copy)]
pub struct FlatItem<'a> {
    pub label: &'a str,
    /// Name on its server.
    pub name: &'a str,
    /// Result of [`shortest_flat_name`].
    pub shortest: &'a str,
}

impl FlatItem<'_> {
    // A server that lists the same tool twice means one tool.
    fn is_same(&self, other: &Self) -> bool {
        (self.label, self.name) == (other.label, other.name)
    }
}

/// Returns the name of a tool or prompt in one list of all, unless another item would have the same name: `label__name`
/// in characters that every client accepts. A name that had to be changed or cut ends with a digest of the pair.
pub fn shortest_flat_name(label: &str, name: &str) -> String {
    flat_name(label, name, DigestLength::minimum_for(label, name))
}

/// Returns the names of the items whose shortest names are not unique, by position. They end with a longer digest.
pub fn longer_flat_names(items: &[FlatItem<'_>]) -> BTreeMap<usize, String> {
    let mut longer: BTreeMap<usize, (DigestLength, String)> = BTreeMap::new();
    loop {
        let mut changed = false;
        for at in equally_named(items, &longer) {
            let FlatItem { label, name, .. } = items[at];
            let minimum = || DigestLength::minimum_for(label, name);
            let digits = longer.get(&at).map_or_else(minimum, |(digits, _)| *digits);
            changed |= digits.longer() != digits;
            longer.insert(at, (digits.longer(), flat_name(label, name, digits.longer())));
        }
        if !changed {
            return longer.into_iter().map(|(at, (_, name))| (at, name)).collect();
        }
    }
}

/// Returns the positions of all items whose name is also the name of another item.
fn equally_named(items: &[FlatItem<'_>], longer: &BTreeMap<usize, (DigestLength, String)>) -> Vec<usize> {
    let name = |at: usize| longer.get(&at).map_or(items[at].shortest, |(_, name)| name);
    let mut first: HashMap<&str, usize> = HashMap::with_capacity(items.len());
    let mut ambiguous: HashSet<&str> = HashSet::new();
    for (at, item) in items.iter().enumerate() {
        let first = *first.entry(name(at)).or_insert(at);
        if !items[first].is_same(item) {
            ambiguous.insert(name(at));
        }
    }
    if ambiguous.is_empty() {
        return Vec::new();
    }
    (0..items.len()).filter(|at| ambiguous.contains(name(*at))).collect()
}

/// Returns the names of tools or prompts in one list of all, for pairs of a label and a server's own name.
pub fn flat_names(things: &[(&str, &str)]) -> Vec<String> {
    let mut names: Vec<String> = things.iter().map(|(label, name)| shortest_flat_name(label, name)).collect();
    let items: Vec<FlatItem<'_>> =
        things.iter().zip(&names).map(|((label, name), shortest)| FlatItem { label, name, shortest }).collect();
    for (at, longer) in longer_flat_names(&items) {
        names[at] = longer;
    }
    names
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DigestLength {
    No,
    Eight,
    // For two names whose first eight digits are equal, which only happens on purpose.
    Sixteen,
    All,
}

impl DigestLength {
    fn minimum_for(label: &str, name: &str) -> Self {
        let plain = |text: &str| text.chars().all(is_legal);
        let length = label.len() + "__".len() + name.len();
        if plain(label) && plain(name) && length <= FLAT_MAX { Self::No } else { Self::Eight }
    }

    fn longer(self) -> Self {
        match self {
            Self::No => Self::Eight,
            Self::Eight => Self::Sixteen,
            Self::Sixteen | Self::All => Self::All,
        }
    }

    fn count(self) -> usize {
        match self {
            Self::No => 0,
            Self::Eight => 8,
            Self::Sixteen => 16,
            Self::All => 62,
        }
    }
}

fn is_legal(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || matches!(letter, '_' | '-')
}

fn to_legal(letter: char) -> char {
    if is_legal(letter) { letter } else { '_' }
}

fn flat_name(label: &str, name: &str, digits: DigestLength) -> String {
    let mut flat: String = label.chars().chain("__".chars()).chain(name.chars()).map(to_legal).collect();
    if digits == DigestLength::No {
        return flat;
    }
    let count = digits.count();
    flat.truncate(FLAT_MAX - "_".len() - count);
    flat.push('_');
    let hash = digest(&SHA256, format!("{label}\0{name}").as_bytes());
    for byte in &hash.as_ref()[..count / 2] {
        let _ = write!(flat, "{byte:02x}");
    }
    flat
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FULL: [&str; 3] = ["files-acme-alice-a", "files-acme-alice-b", "git-acme-alice-c"];

    fn names<'a>(server: &'a str, installation: &'a str, full: &'a str) -> ServerNames<'a> {
        ServerNames { server, installation, full }
    }

    fn own() -> [ServerNames<'static>; 3] {
        [names("files", "a", FULL[0]), names("files", "b", FULL[1]), names("git", "c", FULL[2])]
    }

    #[test]
    fn labels_are_slugs_and_longer_only_for_duplicates() {
        assert_eq!(labels(&own()), ["files-a", "files-b", "git"]);
        // The longer name of one server may equal the slug of another.
        let third = names("files-a", "d", "files-a-acme-alice-d");
        let [one, two, git] = own();
        assert_eq!(labels(&[third, one, two, git]), ["files-a-d", FULL[0], "files-b", "git"]);
    }

    #[test]
    fn a_server_is_found_by_each_of_its_unambiguous_names() {
        let register = ServerNameIndex::new(&own());
        let find = |text: &str| register.find(text).clone();
        assert_eq!(find("git"), NameLookup::One(2));
        assert_eq!(find("git-c"), NameLookup::One(2));
        assert_eq!(find("files-b"), NameLookup::One(1));
        assert_eq!(find(FULL[0]), NameLookup::One(0));
        assert_eq!(find("files"), NameLookup::Several(vec![0, 1]));
        for nothing in ["", "fil", "files-", "files-c", "git-acme", "GIT"] {
            assert_eq!(find(nothing), NameLookup::None, "{nothing}");
            assert!(!own().iter().any(|names| names.has_name(nothing)), "{nothing}");
        }
        assert!(["git", "git-c", FULL[2]].iter().all(|name| own()[2].has_name(name)));
    }

    #[test]
    fn a_path_is_split_after_a_known_server_name() {
        let register = ServerNameIndex::new(&own());
        let split = |text, separator| register.split(text, separator);
        assert_eq!(split("git:log", ':'), Some((&NameLookup::One(2), "git", "log")));
        assert_eq!(split("git:a:b", ':'), Some((&NameLookup::One(2), "git", "a:b")));
        assert_eq!(split("files:read", ':'), Some((&NameLookup::Several(vec![0, 1]), "files", "read")));
        assert_eq!(split("nobody:a:b", ':'), Some((&NameLookup::None, "nobody", "a:b")));
        assert_eq!(split("git|file:///a|b", '|'), Some((&NameLookup::One(2), "git", "file:///a|b")));
        assert_eq!(split("git", ':'), None);
        // A name may belong to more than two servers.
        let (one, third) = (own()[0], names("files", "x", "files-acme-alice-x"));
        let three = ServerNameIndex::new(&[one, own()[1], third]);
        assert_eq!(three.find("files"), &NameLookup::Several(vec![0, 1, 2]));
        // A name may contain the separator.
        let odd = ServerNameIndex::new(&[names("a:b", "c", "a:b-acme-alice-c")]);
        assert_eq!(odd.split("a:b:log", ':'), Some((&NameLookup::One(0), "a:b", "log")));
    }

    #[test]
    fn a_portable_tool_name_is_kept_in_flat_mode() {
        let long = "t".repeat(60);
        let flat =
            flat_names(&[("files", "read_file"), ("files", "read.file"), ("files", &long), ("a.b", "c"), ("a", "ü")]);
        assert_eq!(flat[0], "files__read_file");
        assert!(flat[1].starts_with("files__read_file_") && flat[1].len() == 17 + 8, "{}", flat[1]);
        assert!(flat[2].starts_with("files__tttt") && flat[2].len() == FLAT_MAX, "{}", flat[2]);
        assert!(flat[3].starts_with("a_b__c_"), "{}", flat[3]);
        assert!(flat[4].starts_with("a___"), "{}", flat[4]);
    }

    #[test]
    fn colliding_flat_names_are_disambiguated_but_duplicates_are_not() {
        let same = flat_names(&[("a__b", "c"), ("a", "b__c"), ("a", "c"), ("a", "c")]);
        assert!(same[0].starts_with("a__b__c_") && same[1].starts_with("a__b__c_"), "{same:?}");
        assert_ne!(same[0], same[1]);
        assert_eq!(same[2..], ["a__c", "a__c"]);
        // A tool whose own name equals the disambiguated name of another.
        let taken = same[0].strip_prefix("a__").unwrap_or_default();
        let again = flat_names(&[("a__b", "c"), ("a", "b__c"), ("a", taken)]);
        assert_eq!(again.iter().collect::<HashSet<_>>().len(), 3, "{again:?}");
    }

    proptest! {
        #[test]
        fn flat_names_are_unique_and_independent_of_the_order(
            pairs in proptest::collection::hash_set(("[ab_]{1,4}", "[ab_.ü]{1,70}|[ab_]{1,3}"), 1..20),
        ) {
            let mut pairs: Vec<(&str, &str)> = pairs.iter().map(|(label, name)| (&**label, &**name)).collect();
            let names: HashMap<_, _> = pairs.iter().copied().zip(flat_names(&pairs)).collect();
            prop_assert_eq!(names.values().collect::<HashSet<_>>().len(), pairs.len());
            for name in names.values() {
                prop_assert!(name.len() <= FLAT_MAX && name.chars().all(is_legal), "{}", name);
            }
            pairs.reverse();
            for (pair, name) in pairs.iter().zip(flat_names(&pairs)) {
                prop_assert_eq!(&names[pair], &name);
            }
        }

        #[test]
        fn every_label_finds_its_server(
            slugs in proptest::collection::hash_set(("[ab]{1,2}(-[ab])?", "[ab](-[ab])?"), 1..12),
        ) {
            let full: Vec<String> = slugs.iter().map(|(server, id)| format!("{server}-t-u-{id}")).collect();
            let own: Vec<ServerNames<'_>> = slugs.iter().zip(&full)
                .map(|((server, installation), full)| ServerNames { server, installation, full }).collect();
            let register = ServerNameIndex::new(&own);
            for (at, label) in labels(&own).iter().enumerate() {
                prop_assert_eq!(register.find(label), &NameLookup::One(at), "{}", label);
            }
        }
    }
}
