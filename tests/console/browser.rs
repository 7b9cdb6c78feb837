//! A headless Chromium, controlled over a pipe by the `DevTools` protocol.

use std::collections::HashMap;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::wait::{GIVE_UP, wait_for};

/// Time limit of a command of the browser; it only bounds a failure.
const COMMAND_TIMEOUT: Duration = GIVE_UP;
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs in every page before its own script: records what the page must not do.
const RECORDER: &str = "
    window.violations = [];
    addEventListener('securitypolicyviolation', (event) => violations.push(`${event.violatedDirective} ${event.blockedURI}`));
    addEventListener('error', (event) => violations.push(`error: ${event.message}`));
    addEventListener('unhandledrejection', (event) => violations.push(`rejection: ${event.reason}`));
";

pub(crate) struct Browser {
    commands: Mutex<ChildStdin>,
    ids: AtomicU64,
    inbox: Arc<Inbox>,
    process: Mutex<Child>,
    _profile: TempDir,
}

#[derive(Default)]
struct Inbox {
    waiting: Mutex<HashMap<u64, mpsc::Sender<Value>>>,
    events: Mutex<Vec<Value>>,
}

impl Browser {
    pub(crate) fn start() -> Arc<Self> {
        let profile = TempDir::with_prefix("satellite-browser-").unwrap();
        // The protocol uses the descriptors 3 and 4.
        let mut process = Command::new("sh")
            .args(["-c", r#"exec "$0" "$@" 3<&0 4>&1 0</dev/null 1>/dev/null 2>/dev/null"#])
            .arg("chromium")
            .args(["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run"])
            .args(["--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update"])
            .args(["--disable-extensions", "--hide-scrollbars", "--force-color-profile=srgb", "--lang=en-US"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .env("HOME", profile.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start chromium: {error}; run .ci/install-console-tools"));
        let output = BufReader::new(process.stdout.take().unwrap());
        let commands = Mutex::new(process.stdin.take().unwrap());
        let inbox = Arc::<Inbox>::default();
        let read_into = inbox.clone();
        std::thread::spawn(move || {
            for message in output.split(0) {
                let Ok(message) = message else { return };
                // Chromium may send messages that are newer than this client.
                let Ok(message) = serde_json::from_slice::<Value>(&message) else { continue };
                match message["id"].as_u64() {
                    Some(id) => {
                        let waiting = read_into.waiting.lock().unwrap().remove(&id);
                        // The test may have given up.
                        if let Some(waiting) = waiting {
                            let _ = waiting.send(message);
                        }
                    }
                    None => read_into.events.lock().unwrap().push(message),
                }
            }
        });
        let process = Mutex::new(process);
        Arc::new(Self { commands, ids: AtomicU64::new(1), inbox, process, _profile: profile })
    }

    #[track_caller]
    fn command(&self, session: Option<&str>, method: &str, params: &Value) -> Value {
        let answer = self.try_command(session, method, params);
        assert!(answer["error"].is_null(), "{method}: {answer}");
        answer["result"].clone()
    }

    #[track_caller]
    fn try_command(&self, session: Option<&str>, method: &str, params: &Value) -> Value {
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        let mut message = json!({"id": id, "method": method, "params": params});
        if let Some(session) = session {
            message["sessionId"] = session.into();
        }
        let (sender, answer) = mpsc::channel();
        self.inbox.waiting.lock().unwrap().insert(id, sender);
        let text = format!("{message}\0");
        self.commands.lock().unwrap().write_all(text.as_bytes()).unwrap();
        answer.recv_timeout(COMMAND_TIMEOUT).unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    /// Opens a page that shares no cookies with other pages.
    pub(crate) fn page(self: &Arc<Self>) -> Page {
        let context = self.command(None, "Target.createBrowserContext", &json!({}));
        let context = context["browserContextId"].as_str().unwrap().to_owned();
        self.page_in(&context)
    }

    fn page_in(self: &Arc<Self>, context: &str) -> Page {
        // A tab of its own window stays visible.
        let target = json!({"url": "about:blank", "browserContextId": context, "newWindow": true});
        let target = self.command(None, "Target.createTarget", &target);
        let target = target["targetId"].as_str().unwrap().to_owned();
        let attach = json!({"targetId": target, "flatten": true});
        let session = self.command(None, "Target.attachToTarget", &attach)["sessionId"].as_str().unwrap().to_owned();
        let page = Page { browser: self.clone(), session, context: context.to_owned(), target };
        for domain in ["Page", "Runtime", "Log"] {
            page.command(&format!("{domain}.enable"), &json!({}));
        }
        page.command("Page.addScriptToEvaluateOnNewDocument", &json!({"source": RECORDER}));
        page.resize(1000, 900);
        page
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let close = "{\"id\":0,\"method\":\"Browser.close\"}\0";
        let _ = self.commands.lock().unwrap().write_all(close.as_bytes());
        let mut process = self.process.lock().unwrap();
        let since = Instant::now();
        while process.try_wait().is_ok_and(|ended| ended.is_none()) {
            if since.elapsed() > CLOSE_TIMEOUT {
                let _ = process.kill();
                let _ = process.wait();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A tab.
pub(crate) struct Page {
    browser: Arc<Browser>,
    session: String,
    context: String,
    target: String,
}

impl Page {
    /// Closes the tab.
    pub(crate) fn close(self) {
        self.browser.command(None, "Target.closeTarget", &json!({"targetId": self.target}));
    }

    #[track_caller]
    pub(crate) fn command(&self, method: &str, params: &Value) -> Value {
        self.browser.command(Some(&self.session), method, params)
    }

    /// Opens another tab of the same browser profile.
    pub(crate) fn sibling(&self) -> Self {
        self.browser.page_in(&self.context)
    }

    pub(crate) fn resize(&self, width: u32, height: u32) {
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.command("Emulation.setDeviceMetricsOverride", &metrics);
    }

    pub(crate) fn set_dark(&self, is_dark: bool) {
        let value = if is_dark { "dark" } else { "light" };
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": value}]});
        self.command("Emulation.setEmulatedMedia", &features);
    }

    /// Loads a URL and waits until the page and its script have run.
    #[track_caller]
    pub(crate) fn open(&self, url: &str) {
        self.eval("window.left = true");
        self.command("Page.navigate", &json!({"url": url}));
        self.wait(&format!("the page {url}"), "!window.left && document.readyState === 'complete'");
    }

    /// Returns the value of an expression, which may be a promise.
    #[track_caller]
    pub(crate) fn eval(&self, expression: &str) -> Value {
        let answer = self.try_eval(expression);
        answer.unwrap_or_else(|error| panic!("{expression}: {error}"))
    }

    fn try_eval(&self, expression: &str) -> Result<Value, String> {
        let params = json!({"expression": expression, "awaitPromise": true, "returnByValue": true});
        let answer = self.browser.try_command(Some(&self.session), "Runtime.evaluate", &params);
        match (&answer["error"], &answer["result"]["exceptionDetails"]) {
            (Value::Null, Value::Null) => Ok(answer["result"]["result"]["value"].clone()),
            (Value::Null, thrown) => Err(thrown.to_string()),
            (error, _) => Err(error.to_string()),
        }
    }

    /// Waits until an expression is true. A page that is being replaced has no value.
    #[track_caller]
    pub(crate) fn wait(&self, what: &str, expression: &str) {
        let expression = format!("Boolean({expression})");
        let holds = || self.try_eval(&expression).is_ok_and(|value| value == true).then_some(());
        wait_for(what, holds, || {
            self.try_eval("document.body?.innerText").map_or_else(|error| error, |text| text.to_string())
        });
    }

    /// Returns the text of the first element that a selector matches.
    #[track_caller]
    pub(crate) fn text(&self, selector: &str) -> String {
        let text = self.eval(&format!("document.querySelector({selector:?})?.textContent ?? ''"));
        text.as_str().unwrap().trim().to_owned()
    }

    #[track_caller]
    pub(crate) fn click(&self, selector: &str) {
        self.eval(&format!("document.querySelector({selector:?}).click()"));
    }

    /// Presses a key, as `Tab` or `Enter`.
    pub(crate) fn press(&self, key: &str) {
        let text = if key == "Enter" { "\r" } else { "" };
        let code = match key {
            "Tab" => 9,
            "Enter" => 13,
            "ArrowRight" => 39,
            "ArrowUp" => 38,
            "ArrowDown" => 40,
            _ => 0,
        };
        for kind in ["keyDown", "keyUp"] {
            let text = if kind == "keyDown" { text } else { "" };
            let event = json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text});
            self.command("Input.dispatchKeyEvent", &event);
        }
    }

    /// Writes a picture of the whole page, at most `height` pixels of it.
    pub(crate) fn screenshot(&self, file: &Path, height: u32) {
        let size = self.command("Page.getLayoutMetrics", &json!({}))["cssContentSize"].clone();
        let height = size["height"].as_f64().unwrap().min(f64::from(height));
        let clip = json!({"x": 0, "y": 0, "width": size["width"], "height": height, "scale": 1});
        let mut shot = json!({"format": "png", "captureBeyondViewport": true, "clip": clip});
        if file.extension().is_some_and(|extension| extension == "webp") {
            shot["format"] = "webp".into();
            shot["quality"] = 60.into();
        }
        let picture = self.command("Page.captureScreenshot", &shot);
        let decoded = Command::new("base64")
            .arg("-d")
            .stdin(Stdio::piped())
            .stdout(fs::File::create(file).unwrap())
            .spawn()
            .and_then(|mut child| {
                child.stdin.take().unwrap().write_all(picture["data"].as_str().unwrap().as_bytes())?;
                child.wait()
            });
        assert!(decoded.unwrap().success());
    }

    /// Asserts that the page has broken no policy, thrown no error and opened no dialog.
    #[track_caller]
    pub(crate) fn assert_clean(&self) {
        let violations = self.eval("window.violations");
        assert_eq!(violations, json!([]), "the page has broken rules");
        let events = self.browser.inbox.events.lock().unwrap();
        let own = events.iter().filter(|event| event["sessionId"] == self.session.as_str());
        let bad: Vec<_> = own
            .filter(|event| {
                event["method"] == "Page.javascriptDialogOpening" || event["method"] == "Runtime.exceptionThrown"
            })
            .collect();
        assert!(bad.is_empty(), "{bad:?}");
    }
}
