//! `schemas/` says what the types say.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use mcp_satellite::backend::server::schema::Form;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("schemas")
}

#[test]
fn the_published_schemas_are_those_of_the_types() {
    let update = std::env::var_os("UPDATE_SCHEMAS").is_some();
    let mut stale = Vec::new();
    for form in Form::ALL {
        let (path, now) = (folder().join(form.file()), form.generated());
        if fs::read_to_string(&path).unwrap_or_default() != now {
            stale.push(form.file());
            if update {
                fs::write(path, now).unwrap();
            }
        }
    }
    assert!(stale.is_empty() || update, "stale: {stale:?}; UPDATE_SCHEMAS=1 writes them anew");
}

#[test]
fn every_file_of_the_folder_is_a_schema_that_is_used() {
    let used: BTreeSet<String> = Form::ALL.iter().map(|form| form.file().to_owned()).collect();
    let files = fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(files.collect::<BTreeSet<_>>(), used);
}
