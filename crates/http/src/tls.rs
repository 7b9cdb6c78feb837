//! Certificates of servers: read from PEM files and validated.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

#[derive(Debug, Clone)]
pub struct TlsIdentity(pub Arc<ServerConfig>);

/// Error in a certificate or its key. Contains neither a path nor any content of the files: the configured path may be
/// the key itself.
#[derive(Debug)]
pub struct CertificateError {
    // True for an error in the key file, false for one in the certificate file.
    pub is_key: bool,
    pub why: String,
}

pub fn identity(cert: &Path, key: &Path) -> io::Result<TlsIdentity> {
    let config = read(cert, key).map_err(|CertificateError { is_key, why }| {
        let path = if is_key { key } else { cert };
        io::Error::new(io::ErrorKind::InvalidData, format!("cannot use {}: {why}", path.display()))
    })?;
    Ok(TlsIdentity(Arc::new(config)))
}

pub fn check(cert: &Path, key: &Path) -> Result<(), CertificateError> {
    read(cert, key).map(drop)
}

fn read(cert: &Path, key: &Path) -> Result<ServerConfig, CertificateError> {
    crate::client::install_tls_provider();
    let broken = |is_key| move |error: pem::Error| CertificateError { is_key, why: describe_pem_error(&error, is_key) };
    let chain = CertificateDer::pem_file_iter(cert).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let chain = chain.map_err(broken(false))?;
    if chain.is_empty() {
        return Err(broken(false)(pem::Error::NoItemsFound));
    }
    let secret = PrivateKeyDer::from_pem_file(key).map_err(broken(true))?;
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, secret);
    let mut config = config.map_err(|error| CertificateError { is_key: false, why: error.to_string() })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// Describes an error without the text of the library, which quotes lines of the file.
fn describe_pem_error(error: &pem::Error, is_key: bool) -> String {
    match error {
        pem::Error::Io(error) => error.to_string(),
        pem::Error::NoItemsFound => {
            format!("it contains no {} in PEM", if is_key { "private key" } else { "certificate" })
        }
        pem::Error::SectionTooLarge => "it has a section that is too large".to_owned(),
        _ => "it is not a complete PEM file".to_owned(),
    }
}
