//! The Prometheus text format, version 0.0.4: what every scraper, and the textfile collector of node-exporter, reads.

use super::table::{Kind, Metric};
use std::fmt::{Display, Write};

/// An exposition in the making. Families are begun in order; samples belong to the last one.
#[derive(Default)]
pub(super) struct Text {
    out: String,
}

impl Text {
    /// The `# HELP` and `# TYPE` lines of a metric.
    pub fn family(&mut self, metric: &Metric) {
        let help = metric.help.replace('\\', r"\\").replace('\n', r"\n");
        self.line(format_args!("# HELP {} {help}", metric.name));
        self.line(format_args!("# TYPE {} {}", metric.name, metric.kind.name()));
    }

    /// One series of a counter or gauge: the values of its labels, in the order of the table, and its own.
    pub fn sample(&mut self, metric: &Metric, labels: &[&dyn Display], value: impl Display) {
        debug_assert!(metric.kind != Kind::Histogram && metric.labels.len() == labels.len());
        self.series(metric.name, "", metric.labels, labels, None, &value);
    }

    /// A metric of one series without labels.
    pub fn single(&mut self, metric: &Metric, value: impl Display) {
        self.family(metric);
        self.sample(metric, &[], value);
    }

    /// One series of a histogram: how many observations were at most each bound, all of them, and their sum.
    pub fn histogram(
        &mut self,
        metric: &Metric,
        labels: &[&dyn Display],
        counts: impl Iterator<Item = (f64, u64)>,
        sum: f64,
    ) {
        let mut below = 0;
        for (bound, count) in counts {
            below += count;
            let bound: &dyn Display = if bound.is_finite() { &bound } else { &"+Inf" };
            self.series(metric.name, "_bucket", metric.labels, labels, Some(bound), &below);
        }
        self.series(metric.name, "_sum", metric.labels, labels, None, &sum);
        self.series(metric.name, "_count", metric.labels, labels, None, &below);
    }

    pub fn into_string(self) -> String {
        self.out
    }

    fn series(
        &mut self,
        name: &str,
        suffix: &str,
        names: &[&str],
        values: &[&dyn Display],
        bound: Option<&dyn Display>,
        value: &dyn Display,
    ) {
        let pairs = names.iter().copied().zip(values.iter().copied());
        let pairs: Vec<String> = pairs
            .chain(bound.map(|bound| ("le", bound)))
            .map(|(name, value)| format!("{name}=\"{}\"", escaped(&value.to_string())))
            .collect();
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
        text.family(&metric);
        text.sample(&metric, &[&"a \"b\"\\\n", &7], 1.5);
        let metric = Metric { kind: Kind::Histogram, labels: &[], name: "kvik_y", ..metric };
        text.histogram(&metric, &[], [(0.5, 2), (f64::INFINITY, 1)].into_iter(), 3.25);
        let expected = "# HELP kvik_x Two\\nlines.\n# TYPE kvik_x gauge\n\
                        kvik_x{a=\"a \\\"b\\\"\\\\\\n\",b=\"7\"} 1.5\n\
                        kvik_y_bucket{le=\"0.5\"} 2\nkvik_y_bucket{le=\"+Inf\"} 3\nkvik_y_sum 3.25\nkvik_y_count 3\n";
        assert_eq!(text.into_string(), expected);
    }
}
