//! Resident pages of the program file. A start runs through most of the program once, and the kernel maps what is around
//! each page, too; an idle satellite needs a small part of it.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::{fs, io};

use nix::sys::mman::{MmapAdvise, madvise};

/// Mappings of the program and its libraries that are never written.
#[derive(Debug)]
pub struct ProgramPages(Vec<(usize, usize)>);

impl ProgramPages {
    /// Finds the mappings of this process.
    pub fn find() -> io::Result<Self> {
        Ok(Self(unwritten_mappings(&fs::read_to_string("/proc/self/maps")?)))
    }

    /// Removes the pages of code and constants from this process. The kernel keeps them in its cache of the files and maps
    /// them again when they are used, so this costs little more than the look-ups.
    pub fn release(&self) -> io::Result<()> {
        for (start, length) in &self.0 {
            let Some(start) = NonNull::new(std::ptr::without_provenance_mut::<c_void>(*start)) else { continue };
            #[expect(unsafe_code, reason = "no safe function releases pages of a mapping")]
            // SAFETY: the pages belong to a file mapping that is never written, so the next access reads the same bytes.
            unsafe { madvise(start, *length, MmapAdvise::MADV_DONTNEED) }?;
        }
        Ok(())
    }
}

/// Returns address and length of the mappings of each executable file, from the first to the code. The linker puts
/// constants before the code; what the dynamic loader writes to is after it.
fn unwritten_mappings(maps: &str) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    // The file of the line before, and its mappings until the code, or `None` if the rest of the file may be written.
    let mut file = None;
    let mut before_code = None;
    for line in maps.lines() {
        let mut fields = line.split_ascii_whitespace();
        let (Some(range), Some(access), _, Some(device), Some(inode)) =
            (fields.next(), fields.next(), fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        if file != Some((device, inode)) {
            file = Some((device, inode));
            before_code = (inode != "0").then(Vec::new);
        }
        if access.contains('w') {
            before_code = None;
        }
        let Some(mappings) = &mut before_code else { continue };
        let Some((start, end)) = range.split_once('-') else { continue };
        let (Ok(start), Ok(end)) = (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16)) else { continue };
        mappings.push((start, end - start));
        if access.contains('x') {
            found.append(mappings);
            before_code = None;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_and_code_are_found_and_nothing_after_them() {
        let maps = "\
277214000000-277614000000 rw-p 00000000 00:00 0
55d0c0000000-55d0c0100000 r--p 00000000 fe:00 7 /bin/satellite
55d0c0100000-55d0c0300000 r-xp 00100000 fe:00 7 /bin/satellite
55d0c0300000-55d0c0310000 r--p 00300000 fe:00 7 /bin/satellite
55d0c0310000-55d0c0320000 rw-p 00310000 fe:00 7 /bin/satellite
7eff00000000-7eff00001000 r--s 00000000 fe:00 8 /var/data
7f0000000000-7f0000010000 r-xp 00000000 fe:00 9 /lib/libc.so.6
7f0000010000-7f0000020000 r--p 00010000 fe:00 9 /lib/libc.so.6
7ffc00000000-7ffc00001000 r-xp 00000000 00:00 0 [vdso]
";
        let program = [(0x55d0_c000_0000, 0x10_0000), (0x55d0_c010_0000, 0x20_0000)];
        let library = [(0x7f00_0000_0000, 0x1_0000)];
        assert_eq!(unwritten_mappings(maps), [&program[..], &library].concat());
    }

    #[test]
    fn an_unknown_layout_is_left_alone() {
        for maps in [
            "",
            "1000-2000 rw-p 00000000 fe:00 7 /bin/satellite\n2000-3000 r-xp 00001000 fe:00 7 /bin/satellite\n",
            "1000-2000 r--p 00000000 fe:00 7 /bin/satellite\n",
            "1000-2000 r--p 00000000 00:00 0\n",
        ] {
            assert_eq!(unwritten_mappings(maps), [], "{maps}");
        }
    }

    #[test]
    fn the_program_goes_on_without_its_pages() {
        let resident = || {
            let fields = fs::read_to_string("/proc/self/statm").unwrap();
            fields.split(' ').nth(1).unwrap().parse::<usize>().unwrap()
        };
        let before = resident();
        ProgramPages::find().unwrap().release().unwrap();
        assert!(resident() < before);
    }
}
