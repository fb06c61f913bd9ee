//! What is never printed.

/// The passwords in the URLs that were given.
pub(crate) struct Secrets(Vec<String>);

impl Secrets {
    pub(crate) fn of(urls: impl Iterator<Item = String>) -> Self {
        let mut secrets: Vec<String> = urls.flat_map(|url| passwords(&url)).collect();
        // The longest first: one may be part of another.
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        Secrets(secrets)
    }

    /// The text without them.
    pub(crate) fn hide(&self, text: &str) -> String {
        let hide = |text: String, secret: &String| text.replace(secret.as_str(), "***");
        self.0.iter().fold(text.to_owned(), hide)
    }
}

/// As they are written in a URL, and what they stand for.
fn passwords(url: &str) -> Vec<String> {
    let mut found: Vec<&str> = Vec::new();
    let Some((_, rest)) = url.split_once("://") else {
        return Vec::new();
    };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    // Up to the last `@`, as a password may have one, or a `/`, although it ought to be escaped.
    for part in [authority, rest] {
        if let Some((user, _)) = part.rsplit_once('@') {
            // Without a name it is a token.
            found.push(user.split_once(':').map_or(user, |(_, password)| password));
        }
    }
    for (name, value) in rest
        .split(['?', '&', '#'])
        .filter_map(|pair| pair.split_once('='))
    {
        if name.to_ascii_lowercase().contains("pass") {
            found.push(value);
        }
    }
    let decoded: Vec<String> = found.iter().filter_map(|text| decoded(text)).collect();
    let mut found: Vec<String> = found
        .into_iter()
        .map(str::to_owned)
        .chain(decoded)
        .collect();
    found.retain(|secret| !secret.is_empty());
    found
}

/// Without percent-encoding, if there was any.
fn decoded(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    let mut any = false;
    for part in parts {
        let (digits, rest) = part.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(digits, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
        any = true;
    }
    String::from_utf8(bytes).ok().filter(|_| any)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_hidden_as_it_is_written_and_as_it_is_meant() {
        for (url, text, hidden) in [
            ("redis://:s3cret@h", "no s3cret here", "no *** here"),
            ("amqp://u:p%40ss@h/v", "p@ss and p%40ss", "*** and ***"),
            ("redis://:a/b@c@h:1/2", "a/b@c", "***"),
            ("nats://t0ken@h", "with t0ken", "with ***"),
            ("postgres://h/d?user=u&password=pw9", "pw9", "***"),
            ("mysql://h/d", "h/d", "h/d"),
            ("m-1", "m-1", "m-1"),
            ("redis://:@h", "h", "h"),
            ("redis://:100%@h", "100%", "***"),
        ] {
            let secrets = Secrets::of([url.to_owned()].into_iter());
            assert_eq!(secrets.hide(text), hidden, "{url}");
        }
    }
}
