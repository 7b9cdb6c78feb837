use mcp_satellite_actors::model::actor_tree::{ActorKind, PermitKind, PermitLoad};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use serde_json::json;

use super::*;

/// A time that no test takes.
const LONG: Duration = Duration::from_secs(3600);

fn row(server: &str, status: &str) -> TopRow {
    let name = format!("{server}-acme-alice-{server}");
    TopRow::parse(&json!([name, server, "acme", "alice", status, 0, 0, 3])).unwrap()
}

fn picture(screen: &mut Screen) -> String {
    picture_of_width(screen, 100)
}

fn picture_of_width(screen: &mut Screen, width: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, 8)).unwrap();
    terminal.draw(|frame| screen.draw(frame)).unwrap();
    terminal.backend().to_string()
}

fn press(screen: &mut Screen, code: KeyCode) -> ScreenRequest {
    screen.handle_key(KeyEvent::new(code, KeyModifiers::NONE))
}

#[test]
fn changes_are_applied_to_the_rows() {
    let mut screen = Screen::default();
    screen.apply(Update::Reset(vec![row("files", "online"), row("notes", "online")]));
    let gone = vec![row("files", "online").name];
    screen.apply(Update::Changes { set: vec![row("notes", "error"), row("web", "connecting")], gone });
    let shown = picture(&mut screen);
    assert!(shown.contains("notes") && shown.contains("error") && shown.contains("web"), "{shown}");
    assert!(!shown.contains("files"), "{shown}");
}

#[test]
fn a_restart_needs_a_confirmation() {
    let mut screen = Screen::default();
    screen.apply(Update::Reset(vec![row("files", "online"), row("notes", "online")]));
    assert_eq!(press(&mut screen, KeyCode::Down), ScreenRequest::None);
    assert_eq!(press(&mut screen, KeyCode::Char('r')), ScreenRequest::None);
    assert!(picture(&mut screen).contains("restart notes-acme-alice-notes? y/n"));
    assert_eq!(press(&mut screen, KeyCode::Char('n')), ScreenRequest::None);
    press(&mut screen, KeyCode::Char('r'));
    assert_eq!(press(&mut screen, KeyCode::Char('y')), ScreenRequest::Restart("notes-acme-alice-notes".to_owned()));
}

#[test]
fn the_filter_hides_other_instances() {
    let mut screen = Screen::default();
    screen.apply(Update::Reset(vec![row("files", "online"), row("notes", "error")]));
    "/err".chars().for_each(|letter| drop(press(&mut screen, KeyCode::Char(letter))));
    press(&mut screen, KeyCode::Enter);
    assert!(!picture(&mut screen).contains("files"));
    assert_eq!(press(&mut screen, KeyCode::Enter), ScreenRequest::Output("notes-acme-alice-notes".to_owned()));
    // One closes the output, the next one the filter.
    assert_eq!(press(&mut screen, KeyCode::Esc), ScreenRequest::None);
    assert!(!picture(&mut screen).contains("files"));
    assert_eq!(press(&mut screen, KeyCode::Esc), ScreenRequest::None);
    assert!(picture(&mut screen).contains("files"));
    assert_eq!(press(&mut screen, KeyCode::Esc), ScreenRequest::Quit);
}

#[test]
fn a_lost_stream_is_shown_until_it_is_back() {
    let mut screen = Screen::default();
    screen.apply(Update::Reset(vec![row("files", "online")]));
    // The silence counts, and not only the time since it was noticed.
    screen.received = Instant::now().checked_sub(Duration::from_secs(9));
    screen.apply(Update::Lost("connection refused".to_owned()));
    let shown = picture(&mut screen);
    assert!(shown.contains(" s: connection refused") && !shown.contains("no contact for 0 s"), "{shown}");
    screen.apply(Update::Tick { calls_in_flight: 2 });
    let shown = picture(&mut screen);
    assert!(!shown.contains("no contact") && shown.contains("2 calls in flight"), "{shown}");
}

#[test]
fn sleeping_and_stopped_instances_are_named_so() {
    let mut screen = Screen::default();
    let flagged = |name: &str, status: &str, flags: u8| {
        TopRow::parse(&json!([name, name, "acme", "alice", status, 0, flags, 0])).unwrap()
    };
    let rows = vec![flagged("files", "online", 1), flagged("notes", "offline", 2), flagged("web", "online", 0)];
    screen.apply(Update::Reset(rows));
    let shown = picture(&mut screen);
    assert!(shown.contains("1 asleep") && shown.contains("1 stopped") && shown.contains("1 online"), "{shown}");
}

#[test]
fn a_filter_of_several_words_needs_no_order() {
    let mut screen = Screen::default();
    screen.apply(Update::Reset(vec![row("files", "online"), row("notes", "error")]));
    "/alice notes".chars().for_each(|letter| drop(press(&mut screen, KeyCode::Char(letter))));
    let shown = picture(&mut screen);
    assert!(shown.contains("notes") && !shown.contains("files"), "{shown}");
}

#[test]
fn names_and_the_reason_are_readable_on_a_narrow_terminal() {
    let mut screen = Screen::default();
    let row = json!(["n", "filesystem", "research", "charlie", "error", 0, 0, 4, null, 3, "no such file", null, null]);
    screen.apply(Update::Reset(vec![TopRow::parse(&row).unwrap()]));
    let shown = picture_of_width(&mut screen, 60);
    for part in ["filesystem", "research", "charlie", "error", "4 restarts", "no such file"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
}

#[test]
fn an_open_view_is_read_again_and_a_closed_one_is_not_opened_by_its_content() {
    let mut screen = Screen::default();
    screen.apply(Update::Reset(vec![row("files", "online")]));
    assert_eq!(screen.refresh_request(), ScreenRequest::None, "no view is open");
    assert_eq!(press(&mut screen, KeyCode::Char('t')), ScreenRequest::Tree);
    assert!(picture(&mut screen).contains("tree of actors, is being read"));
    assert_eq!(screen.refresh_request(), ScreenRequest::None, "the first answer is awaited");
    let mut tree = ActorReport::unanswered(ActorKind::Root, "root");
    tree.permits = vec![PermitLoad { pool: PermitKind::Processes, held: 2, waiting: 1, max: Some(4) }];
    screen.apply(Update::Tree(Box::new(tree)));
    screen.view_received = Some(Instant::now() + LONG);
    let shown = picture(&mut screen);
    assert!(shown.contains("starts 2 of 4, 1 wait") && shown.contains("0 s old"), "{shown}");
    assert_eq!(screen.refresh_request(), ScreenRequest::None, "the content is new");
    screen.view_received = Instant::now().checked_sub(VIEW_AGE_MAX);
    assert_eq!(screen.refresh_request(), ScreenRequest::Tree);
    assert_eq!(screen.refresh_request(), ScreenRequest::None, "one request at a time");
    press(&mut screen, KeyCode::Esc);
    screen.apply(Update::Tree(Box::new(ActorReport::unanswered(ActorKind::Root, "root"))));
    assert!(picture(&mut screen).contains("SERVER"));
}

#[test]
fn the_help_returns_after_a_notice() {
    let mut screen = Screen::default();
    screen.apply(Update::Notice("files restarts".to_owned()));
    screen.notice.as_mut().unwrap().1 = Instant::now() + LONG;
    assert!(picture(&mut screen).contains("files restarts"));
    screen.notice.as_mut().unwrap().1 = Instant::now().checked_sub(NOTICE_TIME).unwrap();
    assert!(picture(&mut screen).contains("q quit"));
}

#[test]
fn control_characters_of_servers_are_not_written() {
    let mut screen = Screen::default();
    let hostile = json!(["n", "\u{1b}[31mred", "acme", "alice", "error", 0, 0, 0, null, 3, "a\u{7}b", null, null]);
    screen.apply(Update::Reset(vec![TopRow::parse(&hostile).unwrap()]));
    let shown = picture(&mut screen);
    assert!(!shown.contains(['\u{1b}', '\u{7}']), "{shown:?}");
}
