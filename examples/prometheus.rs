//! Exports what the layer decides to Prometheus.
//!
//! ```text
//! cargo run --features metrics --example prometheus             # handles a few messages, prints the metrics
//! cargo run --features metrics --example prometheus -- --serve  # and serves them: curl http://127.0.0.1:9184/metrics
//! ```
//!
//! The histogram of the age of duplicates says how long ids have to be remembered: a TTL below the largest
//! ages that are seen lets duplicates run again. One that is far above costs room. What to alert on is
//! in the guide, under "Running it".

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};
use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
use tower_idempotency::{
    BoxError, Envelope, IdempotencyLayer, MemoryStore, event::describe_metrics,
};

/// From a second to a week.
const AGES: [f64; 8] = [
    1.0, 10.0, 60.0, 600.0, 3600.0, 21_600.0, 86_400.0, 604_800.0,
];

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), BoxError> {
    let ages = Matcher::Full("tower_idempotency_duplicate_age_seconds".to_owned());
    let prometheus = PrometheusBuilder::new()
        .set_buckets_for_metric(ages, &AGES)?
        .install_recorder()?;
    describe_metrics();

    let mut consumer = ServiceBuilder::new()
        .layer(IdempotencyLayer::new(MemoryStore::new()))
        .service(service_fn(async |_: Envelope| Ok::<_, BoxError>(())));
    // A message, and when copies of it come: at once, after five minutes, after half a day.
    for seconds in [0, 0, 300, 43_200] {
        consumer.ready().await?.call(payment(seconds)?).await?;
    }
    print!("{}", prometheus.render());

    if std::env::args().nth(1).as_deref() == Some("--serve") {
        serve(prometheus).await?;
    }
    Ok(())
}

/// A payment that was made so many seconds ago.
fn payment(seconds: u64) -> Result<Envelope, BoxError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let created_at = now.saturating_sub(Duration::from_secs(seconds)).as_millis();
    let body = format!(
        r#"{{"job":"urn:shop:payment","trace_id":"t","data":{{}},"meta":{{"id":"p-1","schema_version":1,"created_at":{created_at}}}}}"#
    );
    Ok(Envelope::decode(body.as_bytes())?)
}

/// Answers every request with the metrics. A worker that has an HTTP server already gives it a route.
async fn serve(prometheus: PrometheusHandle) -> Result<(), BoxError> {
    let listener = TcpListener::bind("127.0.0.1:9184").await?;
    loop {
        let (mut client, _) = listener.accept().await?;
        let prometheus = prometheus.clone();
        tokio::spawn(async move {
            let _request = client.read(&mut [0; 4096]).await;
            // Histograms are kept as single values until this.
            prometheus.run_upkeep();
            let body = prometheus.render();
            let head = format!(
                "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\n\r\n",
                body.len()
            );
            let _ = client.write_all(format!("{head}{body}").as_bytes()).await;
        });
    }
}
