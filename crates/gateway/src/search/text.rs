//! Splits text into words and computes the similarity of two words.

use std::borrow::Cow;
use std::ops::Range;

// Characters. A longer run is ignored: it is part of a key, an address or an image.
const LETTERS_MAX: usize = 40;

// Words that are ignored in a query that has other words, sorted.
const STOP_WORDS: [&str; 33] = [
    "a", "an", "and", "are", "as", "at", "be", "by", "can", "do", "for", "from", "how", "i", "in", "into", "is", "it",
    "me", "my", "of", "on", "or", "please", "that", "the", "this", "to", "tool", "tools", "want", "which", "with",
];

pub(super) fn is_stop_word(word: &str) -> bool {
    STOP_WORDS.binary_search(&word).is_ok()
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Word<'t> {
    pub(super) whole: Cow<'t, str>,
    /// The parts `git` and `hub` if it was written `GitHub`; empty if it has a single part.
    pub(super) parts: Vec<Cow<'t, str>>,
}

impl<'t> Word<'t> {
    fn new(run: &'t str) -> Self {
        // Most words of a description. They are indexed by the thousand, so they are not copied.
        if run.bytes().all(|letter| letter.is_ascii_lowercase()) {
            return Self { whole: Cow::Borrowed(run), parts: Vec::new() };
        }
        let parts: Vec<_> = pieces(run).map(|range| Cow::Owned(run[range].to_lowercase())).collect();
        let parts = if parts.len() > 1 { parts } else { Vec::new() };
        Self { whole: Cow::Owned(run.to_lowercase()), parts }
    }

    /// Returns the whole word and its parts.
    pub(super) fn texts(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().chain([&self.whole]).map(|text| &**text)
    }
}

pub(super) fn words(text: &str) -> impl Iterator<Item = Word<'_>> {
    let runs = text.split(|letter: char| !letter.is_alphanumeric());
    let fits = |run: &&str| run.len() <= LETTERS_MAX || run.chars().nth(LETTERS_MAX).is_none();
    runs.filter(|run| !run.is_empty()).filter(fits).map(Word::new)
}

fn pieces(run: &str) -> impl Iterator<Item = Range<usize>> {
    let letters: Vec<(usize, char)> = run.char_indices().collect();
    let mut starts = vec![0];
    for at in 1..letters.len() {
        let (before, (start, here)) = (letters[at - 1].1, letters[at]);
        let next_is_small = letters.get(at + 1).is_some_and(|(_, next)| next.is_lowercase());
        let starts_a_piece = before.is_numeric() != here.is_numeric()
            || (before.is_lowercase() && here.is_uppercase())
            || (before.is_uppercase() && here.is_uppercase() && next_is_small);
        if starts_a_piece {
            starts.push(start);
        }
    }
    starts.push(run.len());
    (1..starts.len()).map(move |at| starts[at - 1]..starts[at])
}

/// Returns the letters and digits of a text in lower case. Names that differ only in notation become equal.
pub(super) fn normalize(text: &str) -> String {
    text.chars().filter(|letter| letter.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

#[derive(Debug, Clone, Copy)]
pub(super) struct WordShape {
    pub(super) letters: usize,
    // Bit set of the letters; some letters share a bit.
    mask: u64,
}

impl WordShape {
    pub(super) fn new(word: &str) -> Self {
        let bit = |letter: char| match letter {
            'a'..='z' => u32::from(letter) - u32::from('a'),
            '0'..='9' => 26 + u32::from(letter) - u32::from('0'),
            other => 36 + u32::from(other) % 28,
        };
        let mask = word.chars().fold(0, |mask, letter| mask | 1 << bit(letter));
        Self { letters: word.chars().count(), mask }
    }

    /// Returns true if so many slips may turn one word into the other: a slip changes the length by at most one and the
    /// set by at most two letters.
    fn can_match(self, other: Self, slips: u32) -> bool {
        self.letters.abs_diff(other.letters) <= slips as usize && (self.mask ^ other.mask).count_ones() <= 2 * slips
    }
}

// Similarities: equal; one is a prefix of the other; one stem (`directory`, `directories`); one or two slips (a letter
// wrong, missing or extra, or two letters swapped).
const SAME: f32 = 1.0;
const BEGINNING: f32 = 0.9;
const STEM: f32 = 0.8;
const ONE_SLIP: f32 = 0.8;
const TWO_SLIPS: f32 = 0.6;

pub(super) fn min_prefix_len(letters: usize) -> usize {
    letters.div_ceil(2).max(3)
}

fn prefix_similarity(one: usize, other: usize, shared: usize) -> f32 {
    let (short, long) = (one.min(other), one.max(other));
    if shared == long {
        SAME
    } else if shared == short && short >= min_prefix_len(long) {
        BEGINNING
    } else if shared >= 5 && short - shared <= 1 && long - shared <= 3 {
        STEM
    } else {
        0.0
    }
}

pub(super) fn word_similarity(query: &str, word: &str) -> f32 {
    let shared = query.chars().zip(word.chars()).take_while(|(one, other)| one == other).count();
    prefix_similarity(query.chars().count(), word.chars().count(), shared)
}

pub(super) fn misspelling_similarity(query: (&str, WordShape), word: (&str, WordShape)) -> f32 {
    let slips = match query.1.letters {
        0..4 => return 0.0,
        4..8 => 1,
        _ => 2,
    };
    if !query.1.can_match(word.1, slips) {
        return 0.0;
    }
    match strsim::osa_distance(query.0, word.0) {
        0 => SAME,
        1 => ONE_SLIP,
        2 if slips == 2 => TWO_SLIPS,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn flat(text: &str) -> Vec<String> {
        words(text).flat_map(|word| [vec![word.whole], word.parts].concat()).map(Cow::into_owned).collect()
    }

    #[test]
    fn text_is_split_at_non_letters_and_at_changes_of_case() {
        assert_eq!(flat("read_file.v2/now"), ["read", "file", "v2", "v", "2", "now"]);
        assert_eq!(flat("GitHub"), ["github", "git", "hub"]);
        assert_eq!(flat("parseHTTPServer"), ["parsehttpserver", "parse", "http", "server"]);
        assert_eq!(flat("Größe, ÄNDERN"), ["größe", "ändern"]);
        assert_eq!(flat(" -- "), Vec::<String>::new());
        assert_eq!(flat(&"x".repeat(41)), Vec::<String>::new());
    }

    #[test]
    fn the_stop_words_are_sorted() {
        assert!(STOP_WORDS.is_sorted());
        assert!(is_stop_word("the") && is_stop_word("a") && is_stop_word("with") && !is_stop_word("file"));
    }

    #[test]
    fn words_match_exactly_by_prefix_and_by_stem() {
        for (query, word, expected) in [
            ("file", "file", SAME),
            ("file", "files", BEGINNING),
            ("files", "file", BEGINNING),
            ("search", "searching", BEGINNING),
            ("fi", "file", 0.0),
            ("dir", "directories", 0.0),
            ("directory", "directories", STEM),
            ("creating", "create", STEM),
            ("pull", "push", 0.0),
            ("commit", "comment", 0.0),
        ] {
            assert!(
                (word_similarity(query, word) - expected).abs() < f32::EPSILON,
                "{query}, {word}: {}",
                word_similarity(query, word)
            );
        }
    }

    #[test]
    fn one_typo_is_tolerated_and_two_in_long_words() {
        for (query, word, expected) in [
            ("serach", "search", ONE_SLIP),
            ("comit", "commit", ONE_SLIP),
            ("brannch", "branch", ONE_SLIP),
            ("messsagee", "message", TWO_SLIPS),
            ("repisotory", "repository", TWO_SLIPS),
            ("lsit", "list", ONE_SLIP),
            ("sezrch", "search", ONE_SLIP),
            ("xepositorz", "repository", TWO_SLIPS),
            ("gti", "git", 0.0),
            ("brunhc", "branch", 0.0),
        ] {
            let found = misspelling_similarity((query, WordShape::new(query)), (word, WordShape::new(word)));
            assert!((found - expected).abs() < f32::EPSILON, "{query}, {word}: {found}");
        }
    }

    proptest! {
        #[test]
        fn the_shape_filter_keeps_every_word_within_the_allowed_typos(
            word in "[a-z0-9äß日]{4,12}", at in 0usize..12, with in "[a-zé7]",
        ) {
            let mut letters: Vec<char> = word.chars().collect();
            let at = at % letters.len();
            letters.splice(at..at, with.chars());
            let inserted: String = letters.iter().collect();
            letters.remove((at + 1) % letters.len());
            let replaced: String = letters.iter().collect();
            for (other, slips) in [(inserted, 1), (replaced, 2)] {
                prop_assert!(WordShape::new(&word).can_match(WordShape::new(&other), slips), "{} {}", word, other);
            }
        }

        #[test]
        fn any_text_can_be_split_and_compared(text in any::<String>()) {
            for word in words(&text) {
                let _ = word_similarity(&word.whole, "word");
            }
            let _ = normalize(&text);
        }
    }
}
