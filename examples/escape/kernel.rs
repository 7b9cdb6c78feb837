//! Attempts at operations of the kernel that require an administrator.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount as mount_file_system, umount2};
use nix::sched::{CloneFlags, setns as join, unshare as leave};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::{getegid, geteuid, gethostname};

use crate::arguments::AttemptArguments;
use crate::files::{open_for_writing, unique};
use crate::flags::home;
use crate::outcome::{AttemptOutcome, AttemptSteps, in_child, name};
use crate::procfs;

const CGROUPS_MAX: usize = 500;

pub(crate) fn set_hostname(_: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let mut steps = AttemptSteps::default();
    steps.done("sethostname", gethostname().and_then(nix::unistd::sethostname));
    Ok(steps.into())
}

/// Temporary directory to mount on; dropping it removes the directory.
struct MountPoint(PathBuf);

impl MountPoint {
    fn new() -> io::Result<Self> {
        let make = |folder: &Path| {
            let path = unique(folder);
            fs::create_dir(&path).map(|()| Self(path))
        };
        make(Path::new("/tmp")).or_else(|_| make(&home()))
    }

    fn mount(&self, source: Option<&str>, kind: Option<&str>, flags: MsFlags) -> nix::Result<()> {
        mount_file_system(source, &self.0, kind, flags, None::<&str>)?;
        umount2(&self.0, MntFlags::MNT_DETACH)
    }
}

impl Drop for MountPoint {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

pub(crate) fn mount(_: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let place = match MountPoint::new() {
        Ok(place) => place,
        Err(error) => return Ok(AttemptOutcome::new(false, format!("no folder to mount on: {}", name(&error)))),
    };
    let all = |steps: &mut AttemptSteps, how: &str| {
        steps.done(format!("{how}tmpfs"), place.mount(None, Some("tmpfs"), MsFlags::empty()));
        steps.done(format!("{how}bind /"), place.mount(Some("/"), None, MsFlags::MS_BIND | MsFlags::MS_REC));
        steps.done(format!("{how}proc"), place.mount(None, Some("proc"), MsFlags::empty()));
    };
    let mut steps = in_child(|steps| all(steps, ""));
    steps.append(in_child(|steps| {
        let new = become_root_of_a_namespace();
        let refused = new.is_err();
        steps.done("a user and mount namespace of its own", new);
        if !refused {
            all(steps, "in it: ");
        }
    }));
    Ok(steps.into())
}

fn become_root_of_a_namespace() -> io::Result<()> {
    let (uid, gid) = (geteuid(), getegid());
    leave(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)?;
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("0 {uid} 1"))?;
    fs::write("/proc/self/gid_map", format!("0 {gid} 1"))
}

/// Remounts read-only mounts as writable and reverts that. If allowed, it does so in a new mount namespace.
pub(crate) fn remount(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let chosen = arguments.optional_text("path")?;
    let points: Vec<PathBuf> = if let Some(path) = chosen {
        vec![path.into()]
    } else {
        let read_only = procfs::mounts().into_iter().filter(|mount| mount.options.split(',').any(|it| it == "ro"));
        read_only.map(|mount| mount.point).chain([PathBuf::from("/")]).collect()
    };
    Ok(in_child(|steps| {
        let private = leave(CloneFlags::CLONE_NEWNS).and_then(|()| {
            mount_file_system(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>)
        });
        steps.record("a mount namespace of its own", private.is_ok(), format!("{private:?}"));
        for point in points {
            steps.done(format!("{} writable", point.display()), make_writable(&point));
        }
    })
    .into())
}

fn make_writable(point: &Path) -> nix::Result<()> {
    let before = statvfs(point)?.flags();
    let mut flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT;
    let same = [
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
        (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
        (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
    ];
    for (there, wanted) in same {
        if before.contains(there) {
            flags |= wanted;
        }
    }
    let again = |flags| mount_file_system(None::<&str>, point, None::<&str>, flags, None::<&str>);
    again(flags)?;
    if before.contains(FsFlags::ST_RDONLY) {
        again(flags | MsFlags::MS_RDONLY)?;
    }
    Ok(())
}

pub(crate) fn unshare(_: &AttemptArguments) -> Result<AttemptOutcome, String> {
    const KINDS: [(&str, CloneFlags); 8] = [
        ("user", CloneFlags::CLONE_NEWUSER),
        ("user and network", CloneFlags::CLONE_NEWUSER.union(CloneFlags::CLONE_NEWNET)),
        ("mount", CloneFlags::CLONE_NEWNS),
        ("network", CloneFlags::CLONE_NEWNET),
        ("process", CloneFlags::CLONE_NEWPID),
        ("host name", CloneFlags::CLONE_NEWUTS),
        ("ipc", CloneFlags::CLONE_NEWIPC),
        ("cgroup", CloneFlags::CLONE_NEWCGROUP),
    ];
    let mut steps = AttemptSteps::default();
    for (kind, flags) in KINDS {
        steps.append(in_child(|steps| steps.done(format!("a {kind} namespace"), leave(flags))));
    }
    Ok(steps.into())
}

/// Joins the namespaces of another process that differ from its own.
pub(crate) fn setns(arguments: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let pid = arguments.pid()?.ok_or("`pid` is missing")?;
    let mut steps = AttemptSteps::default();
    for kind in ["user", "mnt", "pid", "net", "uts", "ipc", "cgroup"] {
        let path = format!("/proc/{pid}/ns/{kind}");
        let (theirs, own) = (fs::read_link(&path), fs::read_link(format!("/proc/self/ns/{kind}")));
        match (theirs, own) {
            (Ok(theirs), Ok(own)) if theirs == own => {}
            (Ok(_), _) => steps.append(in_child(|steps| {
                let file = File::open(&path);
                steps.done(path, file.and_then(|file| join(file, CloneFlags::empty()).map_err(io::Error::from)));
            })),
            (Err(error), _) => steps.done(path, Err::<(), _>(error)),
        }
    }
    Ok(steps.into())
}

/// Creates an `io_uring`, through which operations can bypass a system call filter.
pub(crate) fn io_uring(_: &AttemptArguments) -> Result<AttemptOutcome, String> {
    // A zeroed `io_uring_params` of the kernel.
    let mut parameters = [0_u32; 30];
    #[expect(unsafe_code, reason = "no library has a wrapper")]
    // SAFETY: the buffer has the size of the kernel's structure and outlives the call.
    let descriptor = unsafe { nix::libc::syscall(nix::libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
    let made = nix::errno::Errno::result(descriptor).map(|descriptor| {
        // The descriptor stays open until the program exits.
        format!("descriptor {descriptor}")
    });
    let mut steps = AttemptSteps::default();
    steps.saw("io_uring_setup", made);
    Ok(steps.into())
}

/// Opens devices for reading without reading them, which has no side effects, and creates device nodes.
pub(crate) fn device(_: &AttemptArguments) -> Result<AttemptOutcome, String> {
    const DEVICES: [&str; 14] = [
        "/dev/mem",
        "/dev/kmsg",
        "/dev/port",
        "/dev/kvm",
        "/dev/fuse",
        "/dev/net/tun",
        "/dev/loop-control",
        "/dev/ptmx",
        "/dev/sda",
        "/dev/vda",
        "/dev/xvda",
        "/dev/nvme0n1",
        "/dev/mapper/control",
        "/dev/userfaultfd",
    ];
    let mut steps = AttemptSteps::default();
    for path in DEVICES {
        steps.done(path, File::open(path));
    }
    for (kind, file_type, major, minor) in [("block", SFlag::S_IFBLK, 1, 0), ("character", SFlag::S_IFCHR, 1, 1)] {
        for folder in [PathBuf::from("/tmp"), home()] {
            let path = unique(&folder);
            let made = mknod(&path, file_type, Mode::S_IRUSR, makedev(major, minor));
            steps.done(format!("mknod of a {kind} device in {}", folder.display()), made);
            if made.is_ok() {
                steps.done("opened it", File::open(&path));
                let _ = fs::remove_file(&path);
            }
        }
    }
    Ok(steps.into())
}

/// File that can be opened by anyone; the kernel checks permissions when it is written.
const DEFERRED_ERRORS: &str = "/proc/sys/kernel/ns_last_pid";

/// Opens settings of the kernel for writing without writing them.
pub(crate) fn sysctl_write(_: &AttemptArguments) -> Result<AttemptOutcome, String> {
    const FILES: [&str; 11] = [
        "/proc/sysrq-trigger",
        "/proc/sys/kernel/hostname",
        "/proc/sys/kernel/domainname",
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/kernel/modprobe",
        "/proc/sys/vm/drop_caches",
        "/proc/sys/fs/binfmt_misc/register",
        "/proc/sys/net/ipv4/ip_forward",
        "/proc/sys/net/ipv4/ping_group_range",
        "/proc/sys/user/max_user_namespaces",
        "/sys/kernel/uevent_helper",
    ];
    let mut steps = AttemptSteps::default();
    for path in FILES {
        steps.done(path, open_for_writing(Path::new(path)));
    }
    let mut writable = writable_below(Path::new("/proc/sys"));
    writable.retain(|path| *path != Path::new(DEFERRED_ERRORS));
    let some: Vec<&str> = writable.iter().take(20).filter_map(|path| path.to_str()).collect();
    steps.record("all of /proc/sys", !writable.is_empty(), format!("{} writable: {}", writable.len(), some.join(" ")));
    Ok(steps.into())
}

/// Returns the files that this process may write according to `access`, without opening them.
fn writable_below(folder: &Path) -> Vec<PathBuf> {
    use nix::unistd::{AccessFlags, access};
    let mut writable = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(kind) if kind.is_file() && access(&entry.path(), AccessFlags::W_OK).is_ok() => {
                    writable.push(entry.path());
                }
                _ => {}
            }
        }
    }
    writable.sort();
    writable
}

/// Moves a child into another cgroup; it ends there.
pub(crate) fn cgroup_escape(_: &AttemptArguments) -> Result<AttemptOutcome, String> {
    let mounted =
        procfs::mounts().into_iter().filter(|mount| mount.kind.starts_with("cgroup")).map(|mount| mount.point);
    let mut folders: Vec<PathBuf> = mounted.chain([PathBuf::from("/sys/fs/cgroup")]).collect();
    folders.sort();
    folders.dedup();
    let mut seen = 0;
    let mut steps = AttemptSteps::default();
    while let Some(folder) = folders.pop()
        && seen < CGROUPS_MAX
    {
        let path = folder.join("cgroup.procs");
        seen += 1;
        let Ok(file) = open_for_writing(&path) else {
            let inner = fs::read_dir(&folder).into_iter().flatten().flatten();
            let inner = inner.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
            folders.extend(inner.map(|entry| entry.path()));
            continue;
        };
        steps.append(in_child(|steps| {
            let went = (&file).write_all(std::process::id().to_string().as_bytes());
            steps.done(path.as_os_str().as_bytes().escape_ascii().to_string(), went);
        }));
        return Ok(steps.into());
    }
    Ok(AttemptOutcome::new(false, format!("none that may be written among {seen} folders")))
}
