import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.util.Durations;
import google.rpc.GoogleRpc.BadRequest;
import google.rpc.GoogleRpc.ErrorInfo;
import google.rpc.GoogleRpc.RetryInfo;
import io.grpc.ChannelCredentials;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.StatusProto;
import java.io.File;
import java.io.IOException;
import java.util.HashMap;
import java.util.Iterator;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import tailrace.v1.Generation.ChatMessage;
import tailrace.v1.Generation.ChatPrompt;
import tailrace.v1.Generation.GenerateStreamRequest;
import tailrace.v1.Generation.GenerateStreamResponse;
import tailrace.v1.Generation.GenerationSpec;
import tailrace.v1.Generation.SamplingOptions;
import tailrace.v1.Generation.SequenceDelta;
import tailrace.v1.Generation.StopOptions;
import tailrace.v1.GenerationServiceGrpc;

/**
 * Streams one chat completion from a Tailrace server: with a deadline, cancelled on demand, over TLS on demand, and
 * with all that the server says of an error.
 */
public final class Chat {
    private static final String USAGE = """
        usage: chat [flags] PROMPT
          --address HOST:PORT     of the server (127.0.0.1:50051)
          --max-tokens N          longest answer (128)
          --temperature T         0 is greedy (0.7)
          --seed N                same seed, same answer; drawn by the server if absent
          --timeout SECONDS       until the call fails, wherever it is (60)
          --cancel-after DELTAS   cancel after so many
          --ca FILE               the authority that the server's certificate is of; turns TLS on
          --cert FILE             our own certificate, for mutual TLS
          --key FILE              its private key
        """;

    public static void main(String[] arguments) throws Exception {
        Map<String, String> flags;
        try {
            flags = parse(arguments);
        } catch (IllegalArgumentException error) {
            System.err.println(error.getMessage() + "\n" + USAGE);
            System.exit(2);
            return;
        }
        try {
            run(flags);
        } catch (StatusRuntimeException error) {
            explain(error);
            System.exit(1);
        }
    }

    /** The flags by name, and the prompt as "prompt". */
    private static Map<String, String> parse(String[] arguments) {
        Map<String, String> flags = new HashMap<>(Map.of(
            "address", "127.0.0.1:50051", "max-tokens", "128", "temperature", "0.7", "seed", "",
            "timeout", "60", "cancel-after", "0", "ca", "", "cert", "", "key", ""));
        for (int i = 0; i < arguments.length; i++) {
            String name = arguments[i].startsWith("--") ? arguments[i].substring(2) : null;
            if (name == null) {
                flags.put("prompt", arguments[i]);
            } else if (flags.containsKey(name) && i + 1 < arguments.length) {
                flags.put(name, arguments[++i]);
            } else {
                throw new IllegalArgumentException(arguments[i] + ": no such flag, or no value");
            }
        }
        if (!flags.containsKey("prompt")) {
            throw new IllegalArgumentException("a PROMPT is required");
        }
        return flags;
    }

    /** Prints the answer as it comes. Throws StatusRuntimeException if the call fails. */
    private static void run(Map<String, String> flags) throws IOException {
        ManagedChannel channel = Grpc.newChannelBuilder(flags.get("address"), security(flags)).build();
        // A blocking stream is cancelled by its context; closing that, however we leave, frees the request there.
        Context.CancellableContext context = Context.current().withCancellation();
        Context previous = context.attach();
        try {
            // The server hears of the deadline, and does not begin what cannot end in time.
            long timeout = (long) (Double.parseDouble(flags.get("timeout")) * 1000);
            Iterator<GenerateStreamResponse> stream = GenerationServiceGrpc.newBlockingStub(channel)
                .withDeadlineAfter(timeout, TimeUnit.MILLISECONDS)
                .generateStream(request(flags));
            int cancelAfter = Integer.parseInt(flags.get("cancel-after"));
            int deltas = 0;
            while (stream.hasNext()) {
                // `started` comes first and `summary` last; neither has anything to say here.
                for (SequenceDelta sequence : stream.next().getDelta().getSequencesList()) {
                    System.out.print(sequence.getText());
                    System.out.flush();
                    if (sequence.hasFinish()) {
                        System.err.printf("%n%s, %d tokens%n",
                            sequence.getFinish().getReason(), sequence.getFinish().getOutputTokens());
                    }
                    if (++deltas == cancelAfter) {
                        System.err.printf("%ncancelled after %d deltas%n", deltas);
                        return;
                    }
                }
            }
        } finally {
            context.detach(previous);
            context.cancel(null);
            channel.shutdown();
        }
    }

    private static GenerateStreamRequest request(Map<String, String> flags) {
        SamplingOptions.Builder sampling = SamplingOptions.newBuilder()
            .setTemperature(Float.parseFloat(flags.get("temperature")));
        if (!flags.get("seed").isEmpty()) {
            sampling.setSeed(Long.parseUnsignedLong(flags.get("seed")));
        }
        ChatMessage message = ChatMessage.newBuilder().setRole("user").setContent(flags.get("prompt")).build();
        GenerationSpec.Builder spec = GenerationSpec.newBuilder()
            .setChat(ChatPrompt.newBuilder().addMessages(message))
            .setSampling(sampling)
            .setStop(StopOptions.newBuilder().setMaxTokens(Integer.parseInt(flags.get("max-tokens"))));
        return GenerateStreamRequest.newBuilder().setSpec(spec).build();
    }

    /** Plain text, TLS, or mutual TLS, as the flags say. */
    private static ChannelCredentials security(Map<String, String> flags) throws IOException {
        if (flags.get("ca").isEmpty()) {
            return InsecureChannelCredentials.create();
        }
        TlsChannelCredentials.Builder builder = TlsChannelCredentials.newBuilder()
            .trustManager(new File(flags.get("ca")));
        if (!flags.get("cert").isEmpty()) {
            builder.keyManager(new File(flags.get("cert")), new File(flags.get("key")));
        }
        return builder.build();
    }

    /** Prints what went wrong, and what the server says can be done. */
    private static void explain(StatusRuntimeException error) throws InvalidProtocolBufferException {
        System.err.printf("%n%s: %s%n", error.getStatus().getCode(), error.getStatus().getDescription());
        for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
            if (detail.is(ErrorInfo.class)) {
                System.err.printf("  reason: %s%n", detail.unpack(ErrorInfo.class).getReason());
            } else if (detail.is(BadRequest.class)) {
                for (BadRequest.FieldViolation violation : detail.unpack(BadRequest.class).getFieldViolationsList()) {
                    System.err.printf("  field: %s%n", violation.getField());
                }
            } else if (detail.is(RetryInfo.class)) {
                long delay = Durations.toMillis(detail.unpack(RetryInfo.class).getRetryDelay());
                System.err.printf("  retry after: %.1f s%n", delay / 1000.0);
            }
        }
    }
}
