//! A self-signed certificate and its key.

use std::fs;
use std::path::Path;

use rustls::pki_types::CertificateDer;

/// Writes `cert.pem` and `key.pem` into a directory.
pub fn write_pair(dir: &Path) -> CertificateDer<'static> {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    fs::write(dir.join("cert.pem"), pem("CERTIFICATE", made.cert.der())).unwrap();
    fs::write(dir.join("key.pem"), pem("PRIVATE KEY", &made.signing_key.serialize_der())).unwrap();
    made.cert.der().clone()
}

fn pem(kind: &str, bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = format!("-----BEGIN {kind}-----\n");
    for line in bytes.chunks(48) {
        for group in line.chunks(3) {
            let bits = group.iter().fold(0, |bits, byte| bits << 8 | usize::from(*byte)) << (8 * (3 - group.len()));
            let letter = |nth: usize| char::from(LETTERS[bits >> (18 - 6 * nth) & 63]);
            text.extend((0..4).map(|nth| if nth <= group.len() { letter(nth) } else { '=' }));
        }
        text.push('\n');
    }
    text + &format!("-----END {kind}-----\n")
}
