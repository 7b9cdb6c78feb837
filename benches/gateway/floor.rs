//! Lower bound of every gateway: requests go from HTTP to the pipe of one server and responses back, in one thread,
//! without a protocol. Responses are matched to requests by their order, and no message is parsed or changed.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Command, Stdio};

use memchr::{memchr, memmem};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use rustix::event::epoll::{self, EventData, EventFlags};

use crate::endpoint::echo_server;

pub(crate) const ROLE: &str = "floor";

const LISTENER: u64 = u64::MAX;
const SERVER: u64 = u64::MAX - 1;

struct FloorClient {
    stream: TcpStream,
    input: Vec<u8>,
}

/// Serves until the server ends.
#[expect(clippy::print_stdout, reason = "the parent process reads the output")]
pub(crate) fn serve() {
    let command = echo_server::command(None);
    let mut child =
        Command::new(&command[0]).args(&command[1..]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut to_server, mut from_server) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    fcntl(&from_server, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    println!("http://{}/", listener.local_addr().unwrap());

    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN).unwrap();
    epoll::add(&epoll, &from_server, EventData::new_u64(SERVER), EventFlags::IN).unwrap();
    // A closed connection leaves its place empty, so that no later one receives its responses.
    let mut clients: Vec<Option<FloorClient>> = Vec::new();
    let mut waiting = VecDeque::new();
    let (mut requests, mut responses) = (Vec::new(), Vec::new());
    let mut events = Vec::with_capacity(256);
    let mut buffer = vec![0; 256 * 1024];
    loop {
        epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), None).unwrap();
        for event in events.drain(..) {
            let event: epoll::Event = event;
            match event.data.u64() {
                LISTENER => {
                    let stream = listener.accept().unwrap().0;
                    stream.set_nodelay(true).unwrap();
                    stream.set_nonblocking(true).unwrap();
                    let nth = EventData::new_u64(clients.len().try_into().unwrap());
                    epoll::add(&epoll, &stream, nth, EventFlags::IN).unwrap();
                    clients.push(Some(FloorClient { stream, input: Vec::new() }));
                }
                SERVER => match from_server.read(&mut buffer) {
                    Ok(0) => {
                        child.wait().unwrap();
                        return;
                    }
                    Ok(read) => {
                        responses.extend_from_slice(&buffer[..read]);
                        let mut begin = 0;
                        while let Some(length) = memchr(b'\n', &responses[begin..]) {
                            let client: usize = waiting.pop_front().unwrap();
                            respond(clients[client].as_mut(), &responses[begin..begin + length]);
                            begin += length + 1;
                        }
                        responses.drain(..begin);
                    }
                    Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
                },
                nth => {
                    let nth = usize::try_from(nth).unwrap();
                    let Some(client) = &mut clients[nth] else { continue };
                    match client.stream.read(&mut buffer) {
                        Ok(0) => clients[nth] = None,
                        Ok(read) => {
                            client.input.extend_from_slice(&buffer[..read]);
                            while client.take_request(&mut requests) {
                                waiting.push_back(nth);
                            }
                        }
                        Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                        Err(_) => clients[nth] = None,
                    }
                }
            }
        }
        to_server.write_all(&requests).unwrap();
        requests.clear();
    }
}

impl FloorClient {
    /// Appends the body of the first complete request as a line. Returns false if there is none.
    fn take_request(&mut self, requests: &mut Vec<u8>) -> bool {
        let Some(head) = memmem::find(&self.input, b"\r\n\r\n") else { return false };
        let length = memmem::find(&self.input[..head], b"content-length: ").map_or(0, |at| {
            let digits = self.input[at + 16..].iter().take_while(|letter| letter.is_ascii_digit());
            digits.fold(0, |number, digit| 10 * number + usize::from(digit - b'0'))
        });
        let (begin, end) = (head + 4, head + 4 + length);
        if self.input.len() < end {
            return false;
        }
        requests.extend_from_slice(&self.input[begin..end]);
        requests.push(b'\n');
        self.input.drain(..end);
        true
    }
}

/// Sends the response, unless the client is gone. A response fits into the empty buffer of a socket.
fn respond(client: Option<&mut FloorClient>, body: &[u8]) {
    let Some(client) = client else { return };
    let head = format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
    let response = [head.as_bytes(), body].concat();
    // An error means that the client is gone.
    let _ = client.stream.write(&response);
}
