//! Hit rates of every eviction policy on a trace, beside the offline optimum.
//!
//! ```text
//! cargo run --release -p kvik-store --example replay -- TRACE --capacities 1k,3k,10k,30k,50k
//! cargo run --release -p kvik-store --example replay -- --generated [--requests 12000] [--seed 1]
//! ```

use kvik_store::policy::PolicyKind;
use kvik_store::replay::{Trace, Workload, compare, generate, parse_capacities};
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("replay: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let (mut paths, mut generated) = (Vec::new(), false);
    let (mut capacities, mut requests, mut seed) = ("1k,3k,10k,30k,50k".to_string(), 12_000, 1);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--capacities" => capacities = value()?,
            "--requests" => requests = value()?.parse()?,
            "--seed" => seed = value()?.parse()?,
            "--generated" => generated = true,
            option if option.starts_with('-') => return Err(format!("there is no option {option}").into()),
            path => paths.push(path.to_string()),
        }
    }
    if paths.is_empty() && !generated {
        return Err("name a trace of JSON lines, or --generated".into());
    }
    let capacities = parse_capacities(&capacities)?;
    for path in paths {
        print_table(&path, &Trace::read(Path::new(&path))?, &capacities)?;
    }
    if generated {
        for workload in Workload::ALL {
            let name = format!("{}, seed {seed}", workload.name());
            print_table(&name, &generate(workload, requests, seed)?, &capacities)?;
        }
    }
    Ok(())
}

fn print_table(name: &str, trace: &Trace, capacities: &[usize]) -> Result<(), Box<dyn Error>> {
    let (requests, references, blocks) = (trace.requests().len(), trace.references(), trace.blocks());
    println!("{name}: {requests} requests, {references} references to {blocks} blocks");
    if trace.broken_chains() > 0 {
        println!(
            "{} references do not follow the same block as before: the optimum is a bound",
            trace.broken_chains()
        );
    }
    let names = PolicyKind::ALL.map(PolicyKind::name).join(" | ");
    println!("\n| blocks | {names} | optimum | selector to best fixed |");
    println!("|{}", "---|".repeat(PolicyKind::ALL.len() + 3));
    for row in compare(trace, capacities)? {
        print!("| {} |", row.capacity);
        for (_, outcome) in &row.outcomes {
            print!(" {:.4} |", outcome.hit_rate());
        }
        let best = row.best_fixed().name();
        println!(" {:.4} | {:+.1} % ({best}) |", row.optimal_rate(), row.gap() * 100.0);
    }
    println!();
    Ok(())
}
