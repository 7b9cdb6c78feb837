//! The user namespace of a sandbox, created between fork and exec, one for each run: the kernel counts processes
//! against `RLIMIT_NPROC` by user *and* user namespace, so an instance in its own namespace has its own count.
//!
//! If the satellite is root, the namespace maps two users: root, as which the sandbox mounts files that only root can
//! reach, and [`SANDBOX_USER`], as which the server runs, inside and outside. Only a process outside can write such a map:
//! the thread in this module. Otherwise the namespace maps the satellite's own user, which the child writes itself; the
//! sandbox gives that user another number.

use std::fs;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;

use mcp_satellite_actors::model::settings::SANDBOX_USER;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_dumpable;
use nix::sys::stat::Mode;
use nix::unistd::{getegid, geteuid, getpid, read, write};

use super::descriptors::move_above_reserved;

/// Pipes between a child and the mapper thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct IdMapPipes<'a> {
    /// The child writes its process id here.
    pub(super) request: BorrowedFd<'a>,
    /// The mapper writes the process id here, followed by 1 if the map is written, otherwise 0.
    pub(super) response: BorrowedFd<'a>,
}

pub(super) struct IdMapper {
    request_writer: OwnedFd,
    response_reader: OwnedFd,
}

impl IdMapper {
    /// Starts the thread. Returns `None` if the satellite is not root, because the child then writes its map itself.
    pub(super) fn start() -> io::Result<Option<Self>> {
        if !geteuid().is_root() {
            return Ok(None);
        }
        let (questions, ask) = io::pipe()?;
        let (answer, answers) = io::pipe()?;
        thread::Builder::new().name("satellite-map".into()).spawn(move || run(questions, answers))?;
        let (request_writer, response_reader) = (move_above_reserved(ask.into())?, move_above_reserved(answer.into())?);
        Ok(Some(Self { request_writer, response_reader }))
    }

    pub(super) fn pipes(&self) -> IdMapPipes<'_> {
        IdMapPipes { request: self.request_writer.as_fd(), response: self.response_reader.as_fd() }
    }
}

fn run(mut questions: PipeReader, mut answers: PipeWriter) {
    let mut pid = [0; 4];
    while questions.read_exact(&mut pid).is_ok() {
        let process = u32::from_ne_bytes(pid);
        let map = format!("0 0 1\n{SANDBOX_USER} {SANDBOX_USER} 1\n");
        // The process waits for the answer. If it was killed meanwhile, the keeper, its parent, does not reap it before the
        // start has failed, so its number cannot have been reused.
        let written =
            ["uid_map", "gid_map"].iter().all(|file| fs::write(format!("/proc/{process}/{file}"), &map).is_ok());
        let [one, two, three, four] = pid;
        if answers.write_all(&[one, two, three, four, u8::from(written)]).is_err() {
            return;
        }
    }
}

/// Enters a new user namespace, in which at most `below` further ones can be created. Runs between fork and exec: every
/// call is async-signal-safe.
pub(super) fn enter(below: u8, mapping: Option<IdMapPipes<'_>>) -> io::Result<()> {
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    unshare(CloneFlags::CLONE_NEWUSER)?;
    if let Some(mapping) = mapping {
        mapping.await_map()?;
    } else {
        // A fork of a process that is not dumpable cannot write these files. The exec resets the flag.
        set_dumpable(true)?;
        write_file(c"/proc/self/setgroups", b"deny")?;
        write_file(c"/proc/self/uid_map", IdMapLine::map_to_root(user).bytes())?;
        write_file(c"/proc/self/gid_map", IdMapLine::map_to_root(group).bytes())?;
    }
    write_file(c"/proc/sys/user/max_user_namespaces", &[b'0' + below.min(9)])
}

impl IdMapPipes<'_> {
    fn await_map(self) -> io::Result<()> {
        let own = getpid().as_raw().cast_unsigned().to_ne_bytes();
        write(self.request, &own)?;
        // The pipe may still contain the answer to a child that died while it waited.
        loop {
            let mut bytes = [0; 5];
            let mut got = 0;
            while got < bytes.len() {
                match read(self.response, &mut bytes[got..]) {
                    Ok(0) => return Err(Errno::EPIPE.into()),
                    Ok(more) => got += more,
                    Err(Errno::EINTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            if bytes[..4] == own {
                return if bytes[4] == 1 { Ok(()) } else { Err(Errno::EPERM.into()) };
            }
        }
    }
}

fn write_file(path: &std::ffi::CStr, bytes: &[u8]) -> io::Result<()> {
    let file = open(path, OFlag::O_WRONLY | OFlag::O_CLOEXEC, Mode::empty())?;
    Ok(write(&file, bytes).map(drop)?)
}

struct IdMapLine {
    bytes: [u8; 16],
    length: usize,
}

impl IdMapLine {
    fn map_to_root(id: u32) -> Self {
        let mut line = Self { bytes: [0; 16], length: 0 };
        line.push(b"0 ");
        let mut divisor = 1_000_000_000;
        while divisor > 1 && id / divisor == 0 {
            divisor /= 10;
        }
        while divisor > 0 {
            let digit = u8::try_from(id / divisor % 10).unwrap_or_default();
            line.push(&[b'0' + digit]);
            divisor /= 10;
        }
        line.push(b" 1");
        line
    }

    fn push(&mut self, bytes: &[u8]) {
        self.bytes[self.length..self.length + bytes.len()].copy_from_slice(bytes);
        self.length += bytes.len();
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_an_id_map_is_formatted_correctly() {
        for id in [0, 7, 1000, 99999, u32::MAX] {
            assert_eq!(IdMapLine::map_to_root(id).bytes(), format!("0 {id} 1").as_bytes());
        }
    }
}
