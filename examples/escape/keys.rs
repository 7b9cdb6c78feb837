//! Attempts on the kernel's keyrings. A session keyring is inherited across every namespace except user namespaces.

use std::ffi::{CString, c_long};
use std::io;

use nix::errno::Errno;
use nix::libc::{self, SYS_add_key, SYS_keyctl};

use crate::arguments::AttemptArguments;
use crate::outcome::{AttemptOutcome, AttemptSteps};

const SESSION: c_long = -3;
const USER: c_long = -4;
const USER_SESSION: c_long = -5;
const DESCRIBE: c_long = 6;
const SEARCH: c_long = 10;
const READ: c_long = 11;
const SET_TIMEOUT: c_long = 15;

const RINGS: [(&str, c_long); 3] = [("session", SESSION), ("user", USER), ("user session", USER_SESSION)];
const TYPE: &std::ffi::CStr = c"user";

/// Size of each result buffer in bytes, and the number of key ids that fit.
const BUFFER: c_long = 256;
const SERIALS: usize = 64;

fn keyctl(operation: c_long, key: c_long, first: c_long, second: c_long, third: c_long) -> nix::Result<c_long> {
    #[expect(unsafe_code, reason = "no library has a wrapper")]
    // SAFETY: every caller passes the arguments that keyctl(2) requires; pointers are to buffers that outlive the call,
    // with their sizes.
    let answer = unsafe { libc::syscall(SYS_keyctl, operation, key, first, second, third) };
    Errno::result(answer)
}

/// Finds the key with this description, or without one, every key in the keyrings.
pub(crate) fn find(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let needle = arguments.optional_text("needle")?.map(CString::new).transpose().map_err(|error| error.to_string())?;
    let mut steps = AttemptSteps::default();
    for (name, ring) in RINGS {
        match &needle {
            Some(needle) => {
                let found = keyctl(SEARCH, ring, TYPE.as_ptr() as c_long, needle.as_ptr() as c_long, 0);
                steps.saw(format!("search the {name} keyring"), found.and_then(read));
            }
            None => match members(ring) {
                Ok(members) => {
                    let keys: Vec<String> = members.into_iter().filter_map(describe).collect();
                    let keys: Vec<String> = keys.into_iter().filter(|key| !key.starts_with("keyring;")).collect();
                    steps.record(format!("the {name} keyring"), !keys.is_empty(), format!("keys: {}", keys.join(" ")));
                }
                Err(error) => steps.done(format!("the {name} keyring"), Err::<(), _>(error)),
            },
        }
    }
    Ok(steps.into())
}

fn read(key: c_long) -> nix::Result<String> {
    let size = keyctl(READ, key, 0, 0, 0)?;
    Ok(format!("{size} bytes"))
}

fn members(ring: c_long) -> nix::Result<Vec<i32>> {
    let mut serials = [0_i32; SERIALS];
    let size = keyctl(READ, ring, serials.as_mut_ptr() as c_long, BUFFER, 0)?;
    let count = usize::try_from(size).unwrap_or_default() / size_of::<i32>();
    Ok(serials.into_iter().take(count).collect())
}

fn describe(key: i32) -> Option<String> {
    let mut text = [0_u8; 256];
    keyctl(DESCRIBE, key.into(), text.as_mut_ptr() as c_long, BUFFER, 0).ok()?;
    let text = std::ffi::CStr::from_bytes_until_nul(&text).ok()?;
    Some(text.to_string_lossy().into_owned())
}

/// Adds a key to the user's keyring, which expires after a minute.
pub(crate) fn plant(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    const CONTENT: &[u8] = b"planted";
    let name = CString::new(arguments.text("name")?).map_err(|error| error.to_string())?;
    #[expect(unsafe_code, reason = "no library has a wrapper")]
    // SAFETY: type and name end with a zero byte, the content has the length that is passed, and all outlive the call.
    let key =
        unsafe { libc::syscall(SYS_add_key, TYPE.as_ptr(), name.as_ptr(), CONTENT.as_ptr(), CONTENT.len(), USER) };
    let planted = Errno::result(key).and_then(|key| keyctl(SET_TIMEOUT, key, 60, 0, 0));
    let mut steps = AttemptSteps::default();
    steps.done("a key in the user's keyring", planted.map_err(io::Error::from));
    Ok(steps.into())
}
