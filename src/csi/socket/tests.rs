use std::os::unix::net::UnixListener as StdListener;

use super::*;

fn path(dir: &tempfile::TempDir) -> PathBuf {
    dir.path().join("csi.sock")
}

#[tokio::test]
async fn the_socket_is_the_owners_only_and_goes_with_its_program() {
    let dir = tempfile::tempdir().unwrap();
    let socket = bind(Purpose::Csi, &path(&dir)).unwrap();
    let mode = std::fs::metadata(path(&dir)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    drop(socket);
    assert!(!path(&dir).exists());
}

#[tokio::test]
async fn a_socket_that_a_dead_agent_left_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    drop(StdListener::bind(path(&dir)).unwrap());
    assert!(path(&dir).exists(), "the standard library leaves it");
    assert!(bind(Purpose::Csi, &path(&dir)).is_ok());
}

#[tokio::test]
async fn a_socket_that_is_served_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let other = StdListener::bind(path(&dir)).unwrap();
    let error = bind(Purpose::Csi, &path(&dir)).unwrap_err();
    assert!(matches!(error, BindError::InUse { .. }), "{error}");
    drop(other);
    assert!(path(&dir).exists());
}

#[tokio::test]
async fn what_is_not_a_socket_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(path(&dir), "precious").unwrap();
    let error = bind(Purpose::Csi, &path(&dir)).unwrap_err();
    assert!(matches!(error, BindError::NotASocket { .. }), "{error}");
    assert_eq!(std::fs::read_to_string(path(&dir)).unwrap(), "precious");
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(path(&dir), &link).unwrap();
    assert!(
        matches!(bind(Purpose::Csi, &link), Err(BindError::NotASocket { .. })),
        "a symlink is not followed"
    );
}

#[tokio::test]
async fn a_path_that_the_kernel_cannot_take_is_refused_with_its_length() {
    let dir = tempfile::tempdir().unwrap();
    let room = MAX_PATH - dir.path().as_os_str().len() - 1;
    assert!(bind(Purpose::Csi, &dir.path().join("s".repeat(room))).is_ok());
    let error = bind(Purpose::Csi, &dir.path().join("s".repeat(room + 1))).unwrap_err();
    assert!(error.to_string().contains("has 108 bytes, 107 are possible"), "{error}");
}

#[tokio::test]
async fn a_directory_that_is_missing_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let error = bind(Purpose::Csi, &dir.path().join("missing/csi.sock")).unwrap_err();
    assert!(error.to_string().contains("missing/csi.sock"), "{error}");
}

#[tokio::test]
async fn a_new_socket_at_the_same_place_is_not_removed_by_the_old_program() {
    let dir = tempfile::tempdir().unwrap();
    let old = bind(Purpose::Csi, &path(&dir)).unwrap();
    std::fs::remove_file(path(&dir)).unwrap();
    let new = bind(Purpose::Csi, &path(&dir)).unwrap();
    drop(old);
    assert!(path(&dir).exists());
    drop(new);
}

#[tokio::test]
async fn a_socket_that_is_to_stay_outlives_its_program_and_can_be_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let mut socket = bind(Purpose::Registration, &path(&dir)).unwrap();
    assert!(socket.in_place());
    socket.leave();
    drop(socket);
    assert!(path(&dir).exists());
    assert!(bind(Purpose::Registration, &path(&dir)).is_ok());
}
