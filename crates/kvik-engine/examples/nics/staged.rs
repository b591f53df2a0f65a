//! Pages on a GPU that the NIC does not reach: through the ring of the mover, of the owner or both, beside a GPU that the NIC
//! reaches, and `tcp`.
//!
//! Each contender is an owner and a mover, with pages of the host or of the stand-in's GPU. All of them are up all the
//! time, and take turns within each round, another one first each time: so the ratios are of the same round.

use crate::Result;
use crate::pair::{Fabric, OPS, Pair, cuda, library, standin, verbs};
use crate::tables::{Spread, print};
use crate::words::Options;

const DEFAULTS: [(&str, &str); 7] = [
    ("over", "verbs,efa"),
    ("rounds", "10"),
    ("size", "65536"),
    ("count", "256"),
    ("open", "2"),
    ("transfers", "16"),
    ("buffer", "64"),
];
/// Where the owner's and the mover's pages lie, the mover's transport, what the GPU is told, and words of how that goes.
struct Contender {
    name: &'static str,
    memory: [&'static str; 2],
    transport: &'static str,
    told: &'static str,
    how: &'static str,
}

const NO_DMABUF: &str = "attribute id=124 value=0";
const STAGED: Contender = Contender {
    name: "staged",
    memory: ["host", "gpu"],
    transport: "nics",
    told: NO_DMABUF,
    how: "staged for GPU 0",
};
/// The first and the last are what the others are compared with.
const CONTENDERS: [Contender; 5] = [
    Contender { name: "direct", told: "clear", how: "", ..STAGED },
    STAGED,
    Contender { name: "owner's", memory: ["gpu", "host"], how: "ring of the owner's", ..STAGED },
    Contender {
        name: "both",
        memory: ["gpu", "gpu"],
        how: "ring of the owner's, staged for GPU 0",
        ..STAGED
    },
    Contender { name: "tcp", transport: "tcp", told: "clear", ..STAGED },
];
/// More than the stand-in's endpoints take.
const DEPTH: u64 = 256;

/// Measures and prints a table.
///
/// # Errors
/// A transfer that failed or went another way, a wrong byte, or a side's.
pub fn run(options: &[String]) -> Result<()> {
    let options = Options::new(options, &DEFAULTS)?;
    let mut rows = Vec::new();
    for over in options.text("over").split(',') {
        let file = match over {
            "verbs" => verbs()?,
            "efa" => library(&Options::new(&[], &[("library", "")])?)?,
            other => return Err(format!("over={other:?} is neither verbs nor efa").into()),
        };
        measure(&options, over, &file, &mut rows)?;
    }
    print(&["over", "", "pages", "MB/s", "of direct", "of tcp"], &rows);
    Ok(())
}

fn measure(options: &Options, over: &str, file: &str, rows: &mut Vec<Vec<String>>) -> Result<()> {
    let number = |name| options.number::<u64>(name);
    let (size, count, open) = (number("size")?, number("count")?, number("open")?);
    let (transfers, rounds, buffer) = (number("transfers")?, number("rounds")? as usize, number("buffer")?);
    let (driver, mut pairs) = (cuda()?, Vec::new());
    for Contender { memory: [owners, movers], transport, told, how, .. } in CONTENDERS {
        let fabric = Fabric::new()?;
        let mut owner = standin(file, DEPTH, buffer);
        owner[0] = format!("nics={over}");
        owner.push("transport=auto".to_owned());
        let mover = owner.iter().filter(|word| !word.starts_with("transport="));
        let own = [format!("transport={transport}"), format!("memory={movers}")];
        let mover: Vec<String> = mover.cloned().chain(own).collect();
        owner.push(format!("memory={owners}"));
        let mut env = fabric.env(1, DEPTH);
        let folder = driver.rsplit_once('/').map_or(".", |(folder, _)| folder);
        env.push(("LD_LIBRARY_PATH".to_owned(), folder.to_owned()));
        env.push(("KVIK_STANDIN_CUDA_FAULTS".to_owned(), told.to_owned()));
        let mut pair = Pair::start(&owner, &mover, buffer, &env)?;
        for op in OPS {
            pair.grant(op, size)?;
            pair.prove(op, size)?;
            let went = pair.mover.ask(&format!("how {op} {size}"))?.join(" ");
            if !went.contains(how) || (how.is_empty() && (went.contains("staged") || went.contains("ring"))) {
                return Err(format!("the pages went over {went}").into());
            }
        }
        pairs.push((pair, fabric));
    }
    for op in OPS {
        let mut rates = [const { Vec::new() }; CONTENDERS.len()];
        for round in 0..rounds {
            for turn in 0..CONTENDERS.len() {
                let which = (turn + round) % CONTENDERS.len();
                let seconds = pairs[which].0.turn(op, size, (count, open, transfers))?;
                rates[which].push((count * transfers * size) as f64 / seconds / 1e6);
            }
        }
        for (pair, _) in &mut pairs {
            pair.prove(op, size)?;
        }
        rows.extend(CONTENDERS.iter().zip(&rates).map(|(Contender { name, .. }, own)| {
            let of =
                |other: &[f64]| Spread::of(own.iter().zip(other).map(|(own, other)| own / other).collect());
            let rate = Spread::of(own.clone()).show(0);
            let (direct, tcp) = (of(&rates[0]).show(2), of(&rates[CONTENDERS.len() - 1]).show(2));
            vec![over.to_owned(), op.to_owned(), (*name).to_owned(), rate, direct, tcp]
        }));
    }
    Ok(())
}
