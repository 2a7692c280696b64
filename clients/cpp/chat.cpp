// Streams one chat completion from a Tailrace server: with a deadline, cancelled on demand, over TLS on demand, and
// with all that the server says of an error.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>

#include <google/protobuf/util/time_util.h>
#include <grpcpp/grpcpp.h>

#include "google_rpc.pb.h"
#include "tailrace/v1/generation.grpc.pb.h"

namespace pb = tailrace::v1;

const char USAGE[] = R"(usage: chat [flags] PROMPT
  --address HOST:PORT     of the server (127.0.0.1:50051)
  --max-tokens N          longest answer (128)
  --temperature T         0 is greedy (0.7)
  --seed N                same seed, same answer; drawn by the server if absent
  --timeout SECONDS       until the call fails, wherever it is (60)
  --cancel-after DELTAS   cancel after so many
  --ca FILE               the authority that the server's certificate is of; turns TLS on
  --cert FILE             our own certificate, for mutual TLS
  --key FILE              its private key
)";

using Flags = std::map<std::string, std::string>;

// The flags by name, and the prompt as "prompt". Throws std::invalid_argument for what does not exist.
Flags parse(int count, char** arguments) {
    Flags flags = {
        {"address", "127.0.0.1:50051"}, {"max-tokens", "128"}, {"temperature", "0.7"}, {"seed", ""},
        {"timeout", "60"}, {"cancel-after", "0"}, {"ca", ""}, {"cert", ""}, {"key", ""},
    };
    std::string prompt;
    for (int i = 1; i < count; ++i) {
        std::string argument = arguments[i];
        if (argument.rfind("--", 0) != 0) {
            prompt = argument;
        } else if (flags.count(argument.substr(2)) && i + 1 < count) {
            flags[argument.substr(2)] = arguments[++i];
        } else {
            throw std::invalid_argument(argument + ": no such flag, or no value");
        }
    }
    if (prompt.empty()) throw std::invalid_argument("a PROMPT is required");
    flags["prompt"] = prompt;
    return flags;
}

std::string read(const std::string& path) {
    if (path.empty()) return "";
    std::ifstream file(path);
    if (!file) throw std::runtime_error(path + ": cannot be read");
    return {std::istreambuf_iterator<char>(file), {}};
}

// Plain text, TLS, or mutual TLS, as the flags say.
std::shared_ptr<grpc::ChannelCredentials> security(const Flags& flags) {
    if (flags.at("ca").empty()) return grpc::InsecureChannelCredentials();
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = read(flags.at("ca"));
    options.pem_cert_chain = read(flags.at("cert"));
    options.pem_private_key = read(flags.at("key"));
    return grpc::SslCredentials(options);
}

pb::GenerateStreamRequest request(const Flags& flags) {
    pb::GenerateStreamRequest request;
    pb::GenerationSpec& spec = *request.mutable_spec();
    pb::ChatMessage& message = *spec.mutable_chat()->add_messages();
    message.set_role("user");
    message.set_content(flags.at("prompt"));
    spec.mutable_sampling()->set_temperature(std::stof(flags.at("temperature")));
    if (!flags.at("seed").empty()) spec.mutable_sampling()->set_seed(std::stoull(flags.at("seed")));
    spec.mutable_stop()->set_max_tokens(std::stoul(flags.at("max-tokens")));
    return request;
}

// Prints the answer as it comes; the status of the call, OK also if it is we who ended it.
grpc::Status run(const Flags& flags) {
    auto channel = grpc::CreateChannel(flags.at("address"), security(flags));
    auto stub = pb::GenerationService::NewStub(channel);
    // The server hears of the deadline, and does not begin what cannot end in time.
    grpc::ClientContext context;
    std::chrono::duration<double> timeout(std::stod(flags.at("timeout")));
    context.set_deadline(
        std::chrono::system_clock::now() + std::chrono::duration_cast<std::chrono::milliseconds>(timeout));
    const int cancel_after = std::stoi(flags.at("cancel-after"));

    auto stream = stub->GenerateStream(&context, request(flags));
    pb::GenerateStreamResponse response;
    int deltas = 0;
    while (stream->Read(&response)) {
        // `started` comes first and `summary` last; neither has anything to say here.
        for (const pb::SequenceDelta& sequence : response.delta().sequences()) {
            std::cout << sequence.text() << std::flush;
            if (sequence.has_finish()) {
                std::cerr << "\n" << pb::FinishReason_Name(sequence.finish().reason()) << ", "
                          << sequence.finish().output_tokens() << " tokens\n";
            }
            if (++deltas == cancel_after) {
                // Frees the request there; Finish then says CANCELLED.
                context.TryCancel();
                stream->Finish();
                std::cerr << "\ncancelled after " << deltas << " deltas\n";
                return grpc::Status::OK;
            }
        }
    }
    return stream->Finish();
}

// Prints what went wrong, and what the server says can be done.
void explain(const grpc::Status& failed) {
    std::cerr << "\n" << google::rpc::Code_Name(google::rpc::Code(failed.error_code())) << ": "
              << failed.error_message() << "\n";
    google::rpc::Status status;
    if (!status.ParseFromString(failed.error_details())) return;
    for (const auto& detail : status.details()) {
        google::rpc::ErrorInfo info;
        google::rpc::BadRequest bad;
        google::rpc::RetryInfo retry;
        if (detail.UnpackTo(&info)) {
            std::cerr << "  reason: " << info.reason() << "\n";
        } else if (detail.UnpackTo(&bad)) {
            for (const auto& violation : bad.field_violations()) std::cerr << "  field: " << violation.field() << "\n";
        } else if (detail.UnpackTo(&retry)) {
            auto milliseconds = google::protobuf::util::TimeUtil::DurationToMilliseconds(retry.retry_delay());
            std::fprintf(stderr, "  retry after: %.1f s\n", milliseconds / 1000.0);
        }
    }
}

int main(int count, char** arguments) {
    try {
        grpc::Status status = run(parse(count, arguments));
        if (status.ok()) return EXIT_SUCCESS;
        explain(status);
    } catch (const std::invalid_argument& error) {
        std::cerr << error.what() << "\n" << USAGE;
        return 2;
    } catch (const std::exception& error) {
        std::cerr << error.what() << "\n";
    }
    return EXIT_FAILURE;
}
