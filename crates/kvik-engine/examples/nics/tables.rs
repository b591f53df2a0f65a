//! Medians with their spread, and tables.

/// The middle, the lowest and the highest of some figures.
pub struct Spread {
    /// The upper one of two in the middle.
    pub median: f64,
    low: f64,
    high: f64,
}

impl Spread {
    /// Of at least one figure; of none all are 0.
    pub fn of(mut figures: Vec<f64>) -> Spread {
        figures.sort_by(f64::total_cmp);
        let at = |index: usize| figures.get(index).copied().unwrap_or_default();
        Spread { median: at(figures.len() / 2), low: at(0), high: at(figures.len().saturating_sub(1)) }
    }

    /// `MEDIAN [LOW, HIGH]`.
    pub fn show(&self, digits: usize) -> String {
        format!("{:.digits$} [{:.digits$}, {:.digits$}]", self.median, self.low, self.high)
    }
}

/// Prints rows below their heads, in columns.
pub fn print(heads: &[&str], rows: &[Vec<String>]) {
    let heads: Vec<String> = heads.iter().map(|head| (*head).to_owned()).collect();
    let width = |column: usize| {
        let all = rows.iter().chain([&heads]).filter_map(|row| row.get(column));
        all.map(String::len).max().unwrap_or(0)
    };
    for row in [&heads].into_iter().chain(rows) {
        let cells = row.iter().enumerate().map(|(column, cell)| format!("{cell:<w$}", w = width(column)));
        println!("{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
}
