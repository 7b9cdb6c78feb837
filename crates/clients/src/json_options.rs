//! The dialect of JSON in the files of clients.

use jsonc_parser::ParseOptions;

/// Comments and trailing commas are accepted, as VS Code, Zed and opencode do. The rest of JSON5 is not.
pub(crate) const JSON_OPTIONS: ParseOptions = ParseOptions {
    allow_comments: true,
    allow_trailing_commas: true,
    allow_loose_object_property_names: false,
    allow_missing_commas: false,
    allow_single_quoted_strings: false,
    allow_hexadecimal_numbers: false,
    allow_unary_plus_numbers: false,
    allow_bare_decimal_point_numbers: false,
    allow_non_finite_numbers: false,
    allow_extended_string_escapes: false,
};
