//! The sides as children: lines to them, and a line back for each.

use crate::Result;
use std::io::{BufRead, BufReader, Write, stdin, stdout};
use std::process::{Child as Process, ChildStdin, ChildStdout, Command, Stdio};

/// A side. It ends when the value goes.
pub struct Child {
    name: String,
    process: Process,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

impl Child {
    /// Starts a side of this role, on one processor where its options name one.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(role: &str, options: &[String], env: &[(String, String)]) -> Result<Child> {
        let program = std::env::current_exe()?;
        let cpu = options.iter().find_map(|word| word.strip_prefix("cpu=")).filter(|cpu| !cpu.is_empty());
        let mut command = match cpu {
            Some(cpu) => {
                let mut taskset = Command::new("taskset");
                taskset.args(["-c", cpu]).arg(program);
                taskset
            }
            None => Command::new(program),
        };
        command.arg(role).args(options).envs(env.iter().cloned());
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (to, from) = (process.stdin.take(), process.stdout.take().ok_or("a child without stdout")?);
        Ok(Child { name: role.to_owned(), process, to, from: BufReader::new(from) })
    }

    /// Gives a command without waiting for its answer.
    ///
    /// # Errors
    /// The side has ended.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        let to = self.to.as_mut().ok_or("a child without stdin")?;
        writeln!(to, "{line}").map_err(|error| format!("{} at {line:?}: {error}", self.name).into())
    }

    /// The words of the next answer.
    ///
    /// # Errors
    /// The side's, or it has ended.
    pub fn answer(&mut self) -> Result<Vec<String>> {
        let mut line = String::new();
        if self.from.read_line(&mut line)? == 0 {
            return Err(format!("{} has ended; it says why on stderr", self.name).into());
        }
        let mut words = line.split_whitespace().map(str::to_owned);
        match words.next().as_deref() {
            Some("ok") => Ok(words.collect()),
            _ => Err(format!("{}: {}", self.name, line.trim_end()).into()),
        }
    }

    /// A command and its answer.
    ///
    /// # Errors
    /// The side's.
    pub fn ask(&mut self, line: &str) -> Result<Vec<String>> {
        self.tell(line)?;
        self.answer()
    }

    /// A command whose answer is one number.
    ///
    /// # Errors
    /// The side's.
    pub fn number(&mut self, line: &str) -> Result<f64> {
        let words = self.ask(line)?;
        let first = words.first().ok_or("an answer without a number")?;
        first.parse().map_err(|_| format!("{first:?} is no number").into())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // It ends when there is nothing more to hear.
        self.to = None;
        let _ = self.process.wait();
    }
}

/// The side's own part: says each answer, until there is nothing more to hear.
///
/// # Errors
/// The first command that failed, which the starter is told too.
pub fn obey(mut each: impl FnMut(&[&str]) -> Result<String>) -> Result<()> {
    for line in stdin().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        match each(&words) {
            Ok(answer) => say(&answer)?,
            Err(error) => {
                println!("{error}");
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Says an answer.
///
/// # Errors
/// Nobody listens any more.
pub fn say(answer: &str) -> Result<()> {
    println!("ok {answer}");
    stdout().flush()?;
    Ok(())
}
