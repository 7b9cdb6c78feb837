//! Script, style and icon of the pages. Their names contain a hash of the content, so that a browser can keep them for
//! ever and never mixes versions.

use std::sync::LazyLock;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use ring::digest;

use super::secure;
use crate::problem::Problem;

struct Asset {
    stem: &'static str,
    extension: &'static str,
    media_type: &'static str,
    content: &'static [u8],
}

const SCRIPT: usize = 0;
const STYLE: usize = 1;
const ICON: usize = 2;

static ASSETS: [Asset; 3] = [
    Asset {
        stem: "console",
        extension: "js",
        media_type: "text/javascript; charset=utf-8",
        // One script of several files: they share their functions.
        content: concat!(
            include_str!("../assets/schema_form.js"),
            include_str!("../assets/playground.js"),
            include_str!("../assets/calls.js"),
            include_str!("../assets/console.js"),
        )
        .as_bytes(),
    },
    Asset {
        stem: "console",
        extension: "css",
        media_type: "text/css; charset=utf-8",
        content: include_bytes!("../assets/console.css"),
    },
    Asset {
        stem: "icon",
        extension: "svg",
        media_type: "image/svg+xml",
        content: include_bytes!("../assets/icon.svg"),
    },
];

static NAMES: LazyLock<[String; 3]> = LazyLock::new(|| {
    [SCRIPT, STYLE, ICON].map(|index| {
        let Asset { stem, extension, content, .. } = &ASSETS[index];
        let hash = digest::digest(&digest::SHA256, content);
        let hash = hash.as_ref()[..6].iter().fold(0_u64, |hash, byte| (hash << 8) | u64::from(*byte));
        format!("{stem}-{hash:012x}.{extension}")
    })
});

pub(super) fn script_name() -> &'static str {
    &NAMES[SCRIPT]
}

pub(super) fn style_name() -> &'static str {
    &NAMES[STYLE]
}

pub(super) fn icon_name() -> &'static str {
    &NAMES[ICON]
}

/// Returns the size of all assets.
pub fn asset_bytes() -> usize {
    ASSETS.iter().map(|asset| asset.content.len()).sum()
}

/// Returns the asset with this name.
///
/// # Errors
/// There is none.
pub fn answer_asset(name: &str) -> Result<Response, Problem> {
    let found = NAMES.iter().position(|known| known == name).map(|index| &ASSETS[index]);
    let asset = found.ok_or_else(|| Problem::not_found("asset", name))?;
    let mut response = Response::new(Body::from(asset.content));
    secure(&mut response);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(asset.media_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("public, max-age=31536000, immutable"));
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assets_are_small() {
        assert!(asset_bytes() <= 100 * 1024, "{} bytes", asset_bytes());
    }

    #[test]
    fn an_asset_has_the_hash_of_its_content_in_its_name() {
        let response = answer_asset(script_name()).unwrap();
        assert!(response.headers()[header::CACHE_CONTROL].to_str().unwrap().contains("immutable"));
        assert!(answer_asset("console-000000000000.js").is_err());
    }
}
