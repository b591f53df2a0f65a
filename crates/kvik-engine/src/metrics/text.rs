//! The Prometheus text format, version 0.0.4: what every scraper, and the textfile collector of node-exporter, reads.

use super::table::{Kind, Metric};
use std::fmt::{Display, Write};

/// An exposition in the making. Families are begun in order; samples belong to the last one.
#[derive(Default)]
pub struct Text {
    out: String,
}

impl Text {
    /// The `# HELP` and `# TYPE` lines of a metric.
    pub fn family(&mut self, metric: &Metric) {
        let help = metric.help.replace('\\', r"\\").replace('\n', r"\n");
        self.line(format_args!("# HELP {} {help}", metric.name));
        self.line(format_args!("# TYPE {} {}", metric.name, metric.kind.name()));
    }

    /// A counter or gauge: of each series the values of its labels, in the order of the table, and its own.
    pub fn rows<const N: usize, V: Display>(
        &mut self,
        metric: &Metric,
        rows: impl IntoIterator<Item = ([String; N], V)>,
    ) {
        debug_assert!(metric.kind != Kind::Histogram && metric.labels.len() == N);
        self.family(metric);
        for (labels, value) in rows {
            self.series(metric, "", &labels, None, &value);
        }
    }

    /// A metric of one series without labels.
    pub fn single(&mut self, metric: &Metric, value: impl Display) {
        self.rows(metric, [([], value)]);
    }

    /// One series of a histogram: how many observations were at most each bound, all of them, and their sum.
    pub fn histogram(
        &mut self,
        metric: &Metric,
        labels: &[String],
        counts: impl Iterator<Item = (f64, u64)>,
        sum: f64,
    ) {
        let mut below = 0;
        for (bound, count) in counts {
            below += count;
            let bound = if bound.is_finite() { bound.to_string() } else { "+Inf".to_owned() };
            self.series(metric, "_bucket", labels, Some(bound), &below);
        }
        self.series(metric, "_sum", labels, None, &sum);
        self.series(metric, "_count", labels, None, &below);
    }

    /// What was written.
    pub fn into_string(self) -> String {
        self.out
    }

    fn series(
        &mut self,
        metric: &Metric,
        suffix: &str,
        labels: &[String],
        bound: Option<String>,
        value: &dyn Display,
    ) {
        let name = metric.name;
        let pairs = metric.labels.iter().zip(labels).chain(bound.as_ref().map(|bound| (&"le", bound)));
        let pairs: Vec<String> =
            pairs.map(|(label, value)| format!("{label}=\"{}\"", escaped(value))).collect();
        match pairs.is_empty() {
            true => self.line(format_args!("{name}{suffix} {value}")),
            false => self.line(format_args!("{name}{suffix}{{{}}} {value}", pairs.join(","))),
        }
    }

    fn line(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing to a string does not fail.
        let _ = writeln!(self.out, "{text}");
    }
}

/// The values of a series' labels.
pub(super) fn labels<const N: usize>(values: [&dyn Display; N]) -> [String; N] {
    values.map(ToString::to_string)
}

fn escaped(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped_and_buckets_add_up() {
        let metric = Metric { name: "kvik_x", kind: Kind::Gauge, labels: &["a", "b"], help: "Two\nlines." };
        let mut text = Text::default();
        text.rows(&metric, [(["a \"b\"\\\n".to_owned(), 7.to_string()], 1.5)]);
        let metric = Metric { kind: Kind::Histogram, labels: &[], name: "kvik_y", ..metric };
        text.histogram(&metric, &[], [(0.5, 2), (f64::INFINITY, 1)].into_iter(), 3.25);
        let expected = "# HELP kvik_x Two\\nlines.\n# TYPE kvik_x gauge\n\
                        kvik_x{a=\"a \\\"b\\\"\\\\\\n\",b=\"7\"} 1.5\n\
                        kvik_y_bucket{le=\"0.5\"} 2\nkvik_y_bucket{le=\"+Inf\"} 3\nkvik_y_sum 3.25\nkvik_y_count 3\n";
        assert_eq!(text.into_string(), expected);
    }
}
