//! The `union-csi` program.

fn main() -> std::process::ExitCode {
    union_csi::cli::main()
}
