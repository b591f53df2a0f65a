//! What kvik's NIC layer costs beside the devices that it uses. bench/README.md has the commands.
//!
//! `cargo run --release -p kvik-engine --example nics -- COMMAND [NAME=VALUE ...]`
//!
//! - `against`: kvik over a provider of libfabric, and a loop over the same provider that does nothing else;
//! - `queues`: transfers of few and of many extents, over the stand-in's queues of several depths;
//! - `first`: the first transfer between two engines, cold and after `warm`, as a function of NICs a side;
//! - `threads`: work requests of 16 NICs that move nothing, by how many threads drive them;
//! - `staged`: pages on a GPU that the NIC does not reach, through its ring, beside one that it reaches, and `tcp`;
//! - `rate`: kvik alone, for comparisons with the tools of others.
//!
//! Each side is a process of its own: this program again, as one of the [`sides`] or [`plain`] ones, which is
//! told what to do in lines. An option that a command does not know is an error that names those that it
//! does.

mod against;
mod bytes;
mod children;
mod first;
mod pair;
mod plain;
mod queues;
mod rate;
mod sides;
mod staged;
mod tables;
mod threads;
mod words;

use std::error::Error;
use std::process::ExitCode;

/// Whatever goes wrong ends the program with its text.
type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (command, options) =
        words.split_first().map_or(("", &[] as &[String]), |(first, rest)| (first, rest));
    let done = match command {
        "against" => against::run(options),
        "queues" => queues::run(options),
        "first" => first::run(options),
        "threads" => threads::run(options),
        "staged" => staged::run(options),
        "rate" => rate::run(options),
        "owner" | "mover" => sides::serve(command, options),
        "plain-target" => plain::target(options),
        "plain-mover" => plain::mover(options),
        other => {
            let all = "against, queues, first, threads, staged or rate";
            Err(format!("{other:?} is no command: take {all}").into())
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nics {command}: {error}");
            ExitCode::FAILURE
        }
    }
}
