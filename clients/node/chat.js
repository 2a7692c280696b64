// Streams one chat completion from a Tailrace server: with a deadline, cancelled on demand, over TLS on demand, and
// with all that the server says of an error.
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const USAGE = `usage: node chat.js [flags] PROMPT
  --address HOST:PORT     of the server (127.0.0.1:50051)
  --max-tokens N          longest answer (128)
  --temperature T         0 is greedy (0.7)
  --seed N                same seed, same answer; drawn by the server if absent
  --timeout SECONDS       until the call fails, wherever it is (60)
  --cancel-after DELTAS   cancel after so many
  --ca FILE               the authority that the server's certificate is of; turns TLS on
  --cert FILE             our own certificate, for mutual TLS
  --key FILE              its private key
`;

const text = (value) => ({ type: "string", ...(value && { default: value }) });

function parse() {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      address: text("127.0.0.1:50051"),
      "max-tokens": text("128"),
      temperature: text("0.7"),
      seed: text(),
      timeout: text("60"),
      "cancel-after": text("0"),
      ca: text(),
      cert: text(),
      key: text(),
    },
  });
  if (positionals.length !== 1) throw new Error("one PROMPT is required");
  return { ...values, prompt: positionals[0] };
}

// The schema is read when the program starts: nothing is generated. 64-bit numbers come as strings, which lose nothing.
const folder = (path) => fileURLToPath(new URL(path, import.meta.url));
const schema = loadSync(["tailrace/v1/generation.proto", "google_rpc.proto"], {
  includeDirs: [folder("../../protos"), folder("..")],
  keepCase: true,
  longs: String,
  enums: String,
  defaults: true,
  oneofs: true,
});
const { tailrace } = grpc.loadPackageDefinition(schema);

/** Plain text, TLS, or mutual TLS, as the flags say. */
function security(flags) {
  if (!flags.ca) return grpc.credentials.createInsecure();
  const read = (file) => (file ? readFileSync(file) : null);
  return grpc.credentials.createSsl(read(flags.ca), read(flags.key), read(flags.cert));
}

function spec(flags) {
  return {
    chat: { messages: [{ role: "user", content: flags.prompt }] },
    sampling: { temperature: Number(flags.temperature), ...(flags.seed && { seed: flags.seed }) },
    stop: { max_tokens: Number(flags["max-tokens"]) },
  };
}

async function run(flags) {
  const client = new tailrace.v1.GenerationService(flags.address, security(flags));
  // The server hears of the deadline, and does not begin what cannot end in time.
  const deadline = Date.now() + Number(flags.timeout) * 1000;
  const call = client.GenerateStream({ spec: spec(flags) }, { deadline });
  let deltas = 0;
  try {
    for await (const response of call) {
      // `started` comes first and `summary` last; neither has anything to say here.
      for (const sequence of response.delta?.sequences ?? []) {
        process.stdout.write(sequence.text);
        if (sequence.finish) {
          console.error(`\n${sequence.finish.reason}, ${sequence.finish.output_tokens} tokens`);
        }
        if (++deltas === Number(flags["cancel-after"])) {
          console.error(`\ncancelled after ${deltas} deltas`);
          return;
        }
      }
    }
  } finally {
    // Frees the request there, however we leave; a call that is over does not mind.
    call.on("error", () => {});
    call.cancel();
    client.close();
  }
}

const DETAILS = {
  "google.rpc.ErrorInfo": (info) => [`reason: ${info.reason}`],
  "google.rpc.BadRequest": (bad) => bad.field_violations.map(({ field }) => `field: ${field}`),
  "google.rpc.RetryInfo": ({ retry_delay: delay }) => [
    `retry after: ${(Number(delay.seconds) + delay.nanos / 1e9).toFixed(1)} s`,
  ],
};

const decode = (name, bytes) => schema[name].deserialize(bytes);

/** Prints what went wrong, and what the server says can be done. */
function explain(error) {
  if (error.code === undefined || !error.metadata) {
    console.error(error.message);
    return;
  }
  console.error(`\n${grpc.status[error.code]}: ${error.details}`);
  for (const bytes of error.metadata.get("grpc-status-details-bin")) {
    for (const detail of decode("google.rpc.Status", bytes).details) {
      const name = detail.type_url.split("/").pop();
      if (!(name in DETAILS)) continue;
      for (const line of DETAILS[name](decode(name, detail.value))) console.error(`  ${line}`);
    }
  }
}

let flags;
try {
  flags = parse();
} catch (error) {
  console.error(`${error.message}\n${USAGE}`);
  process.exit(2);
}
try {
  await run(flags);
} catch (error) {
  explain(error);
  process.exitCode = 1;
}
