// Command chat streams one chat completion from a Tailrace server: with a deadline, cancelled on demand, over TLS on
// demand, and with all that the server says of an error.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	pb "tailrace/v1"
)

var (
	address     = flag.String("address", "127.0.0.1:50051", "HOST:PORT of the server")
	maxTokens   = flag.Uint("max-tokens", 128, "longest answer")
	temperature = flag.Float64("temperature", 0.7, "0 is greedy")
	seed        = flag.Uint64("seed", 0, "same seed, same answer; drawn by the server if absent")
	timeout     = flag.Float64("timeout", 60, "seconds until the call fails, wherever it is")
	cancelAfter = flag.Int("cancel-after", 0, "cancel after so many deltas")
	ca          = flag.String("ca", "", "FILE with the authority that the server's certificate is of; turns TLS on")
	cert        = flag.String("cert", "", "FILE with our own certificate, for mutual TLS")
	key         = flag.String("key", "", "FILE with its private key")
)

func main() {
	flag.Parse()
	if flag.NArg() != 1 {
		fmt.Fprintln(os.Stderr, "usage: chat [flags] PROMPT")
		flag.PrintDefaults()
		os.Exit(2)
	}
	if err := run(flag.Arg(0)); err != nil {
		explain(err)
		os.Exit(1)
	}
}

func run(prompt string) error {
	security, err := security()
	if err != nil {
		return err
	}
	connection, err := grpc.Dial(*address, security)
	if err != nil {
		return err
	}
	defer connection.Close()
	client := pb.NewGenerationServiceClient(connection)

	// The server hears of the deadline, and does not begin what cannot end in time. Cancelling the context, which
	// returning from here does too, frees the request there.
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(*timeout*float64(time.Second)))
	defer cancel()
	stream, err := client.GenerateStream(ctx, &pb.GenerateStreamRequest{Spec: spec(prompt)})
	if err != nil {
		return err
	}
	for deltas := 0; ; {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		// `started` comes first and `summary` last; an unset one has nothing to say here.
		for _, sequence := range response.GetDelta().GetSequences() {
			fmt.Print(sequence.Text)
			if sequence.Finish != nil {
				fmt.Fprintf(os.Stderr, "\n%s, %d tokens\n", sequence.Finish.Reason, sequence.Finish.OutputTokens)
			}
			if deltas++; deltas == *cancelAfter {
				cancel()
				fmt.Fprintf(os.Stderr, "\ncancelled after %d deltas\n", deltas)
				return nil
			}
		}
	}
}

func spec(prompt string) *pb.GenerationSpec {
	limit, warmth := uint32(*maxTokens), float32(*temperature)
	spec := &pb.GenerationSpec{
		Prompt: &pb.GenerationSpec_Chat{
			Chat: &pb.ChatPrompt{Messages: []*pb.ChatMessage{{Role: "user", Content: prompt}}},
		},
		Sampling: &pb.SamplingOptions{Temperature: &warmth},
		Stop:     &pb.StopOptions{MaxTokens: &limit},
	}
	flag.Visit(func(given *flag.Flag) {
		if given.Name == "seed" {
			spec.Sampling.Seed = seed
		}
	})
	return spec
}

// security is plain text, TLS, or mutual TLS, as the flags say.
func security() (grpc.DialOption, error) {
	if *ca == "" {
		return grpc.WithInsecure(), nil
	}
	authority, err := os.ReadFile(*ca)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
	if !config.RootCAs.AppendCertsFromPEM(authority) {
		return nil, fmt.Errorf("%s: no certificate in PEM", *ca)
	}
	if *cert != "" {
		own, err := tls.LoadX509KeyPair(*cert, *key)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{own}
	}
	return grpc.WithTransportCredentials(credentials.NewTLS(config)), nil
}

// explain prints what went wrong, and what the server says can be done.
func explain(err error) {
	failed, ok := status.FromError(err)
	if !ok {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	fmt.Fprintf(os.Stderr, "\n%s: %s\n", code.Code(failed.Code()), failed.Message())
	for _, detail := range failed.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			fmt.Fprintf(os.Stderr, "  reason: %s\n", detail.Reason)
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				fmt.Fprintf(os.Stderr, "  field: %s\n", violation.Field)
			}
		case *errdetails.RetryInfo:
			delay := time.Duration(detail.RetryDelay.Seconds)*time.Second + time.Duration(detail.RetryDelay.Nanos)
			fmt.Fprintf(os.Stderr, "  retry after: %.1f s\n", delay.Seconds())
		}
	}
}
