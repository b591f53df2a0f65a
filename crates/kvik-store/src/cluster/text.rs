//! The figures of several servers as one text.

/// Samples of one metric, and the lines before them.
#[derive(Default)]
struct Family<'a> {
    name: &'a str,
    comments: Vec<&'a str>,
    samples: String,
}

/// Joins texts in the Prometheus format: each sample gets the label `member`, and a metric is introduced once.
pub(super) fn joined<'a>(texts: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut families: Vec<Family<'a>> = Vec::new();
    for (member, text) in texts {
        let mut at = None;
        for line in text.lines() {
            if let Some(comment) = line.strip_prefix("# ") {
                let name = comment.split(' ').nth(1).unwrap_or_default();
                let known = families.iter().position(|family| family.name == name);
                let family = known.unwrap_or_else(|| {
                    families.push(Family { name, ..Family::default() });
                    families.len() - 1
                });
                let comments = &mut families[family].comments;
                if !comments.contains(&line) {
                    comments.push(line);
                }
                at = Some(family);
            } else if let Some(family) = at.filter(|_| !line.is_empty()) {
                labelled(line, member, &mut families[family].samples);
            }
        }
    }
    let mut joined = String::new();
    for family in families {
        family.comments.iter().for_each(|line| {
            joined.push_str(line);
            joined.push('\n');
        });
        joined.push_str(&family.samples);
    }
    joined
}

/// A sample with its member as the first label.
fn labelled(line: &str, member: &str, into: &mut String) {
    let member = member.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let end = line.find(['{', ' ']).unwrap_or(line.len());
    let (name, rest) = line.split_at(end);
    let line = match rest.strip_prefix('{') {
        Some(labels) if labels.starts_with('}') => format!("{name}{{member=\"{member}\"{labels}\n"),
        Some(labels) => format!("{name}{{member=\"{member}\",{labels}\n"),
        None => format!("{name}{{member=\"{member}\"}}{rest}\n"),
    };
    into.push_str(&line);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_metric_is_introduced_once_and_each_sample_has_its_member() {
        let text = |value| {
            format!("# HELP a What.\n# TYPE a counter\na {value}\na{{t=\"x\"}} 2\n# HELP b B.\nb{{}} 1\n")
        };
        let (one, two) = (text(1), text(7));
        let joined = joined([("h:1", one.as_str()), ("h:\"2", two.as_str())].into_iter());
        let expected = "# HELP a What.\n# TYPE a counter\na{member=\"h:1\"} 1\na{member=\"h:1\",t=\"x\"} 2\n\
            a{member=\"h:\\\"2\"} 7\na{member=\"h:\\\"2\",t=\"x\"} 2\n# HELP b B.\nb{member=\"h:1\"} 1\n\
            b{member=\"h:\\\"2\"} 1\n";
        assert_eq!(joined, expected);
    }
}
