//! Options of the form NAME=VALUE.

use crate::Result;
use std::collections::BTreeMap;
use std::str::FromStr;

/// Options with their defaults, all as text.
pub struct Options(BTreeMap<String, String>);

impl Options {
    /// What is given, over what is the default.
    ///
    /// # Errors
    /// A word without `=`, or a name that has no default.
    pub fn new(given: &[String], defaults: &[(&str, &str)]) -> Result<Options> {
        let mut all: BTreeMap<String, String> =
            defaults.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let known = all.keys().cloned().collect::<Vec<_>>().join(", ");
        for word in given {
            let Some((name, value)) = word.split_once('=') else {
                return Err(format!("{word:?} is not NAME=VALUE; there are: {known}").into());
            };
            match all.get_mut(name) {
                Some(place) => value.clone_into(place),
                None => return Err(format!("there is no option {name:?}; there are: {known}").into()),
            }
        }
        Ok(Options(all))
    }

    /// The same with another text for an option.
    pub fn with(&self, name: &str, value: String) -> Options {
        let mut all = self.0.clone();
        all.insert(name.to_owned(), value);
        Options(all)
    }

    /// The text of an option.
    pub fn text(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    /// A number.
    ///
    /// # Errors
    /// It is none.
    pub fn number<N: FromStr>(&self, name: &str) -> Result<N> {
        let text = self.text(name);
        text.parse().map_err(|_| format!("{name}={text:?} is no number").into())
    }

    /// Numbers with commas between.
    ///
    /// # Errors
    /// One of them is none.
    pub fn numbers(&self, name: &str) -> Result<Vec<u64>> {
        let parse = |text: &str| text.parse().map_err(|_| format!("{name}: {text:?} is no number").into());
        self.text(name).split(',').map(parse).collect()
    }

    /// These options, as words for a child.
    pub fn words(&self, names: &[&str]) -> Vec<String> {
        names.iter().map(|name| format!("{name}={}", self.text(name))).collect()
    }
}
