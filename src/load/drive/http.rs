//! drive/http
