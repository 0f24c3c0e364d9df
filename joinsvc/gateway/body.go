package gateway

import (
	"bytes"
	"errors"
	"io"
	"net/http"

	"github.com/better-compute/join-operator/api/wire"
)

// smallBody is what a join by token, ticket or cloud identity stays below. Larger
// bodies, as TPMs with their event logs send, are held in memory by only so many
// requests at once, whatever the number of connections.
const smallBody = 16 << 10

// Errors of readBody.
var (
	errTooLarge = errors.New("body too large")
	errBusy     = errors.New("too many large bodies at once")
)

// slots is a number of requests that may do something at once.
type slots chan struct{}

// take takes a slot if there is one.
func (s slots) take() bool {
	select {
	case s <- struct{}{}:
		return true
	default:
		return false
	}
}

func (s slots) give() { <-s }

// body is a request's body, whole.
type body struct {
	bytes []byte
	large slots // where a slot was taken
}

// free gives back what the body held.
func (b *body) free() {
	if b.large != nil {
		b.large.give()
	}
}

// readBody reads at most what the protocol allows. Memory follows what came, not
// what was announced, so who sends slowly holds little. How long it may take is
// the server's read timeout.
func readBody(w *counted, r *http.Request, large slots) (*body, error) {
	if r.ContentLength == 0 {
		return &body{}, nil
	}
	in := http.MaxBytesReader(w.ResponseWriter, r.Body, wire.MaxBody)
	if n := r.ContentLength; n > 0 && n <= smallBody {
		b := make([]byte, n)
		if _, err := io.ReadFull(in, b); err != nil {
			return nil, err
		}
		return &body{bytes: b}, nil
	}
	var buf bytes.Buffer
	switch _, err := io.CopyN(&buf, in, smallBody); {
	case errors.Is(err, io.EOF):
		return &body{bytes: buf.Bytes()}, nil
	case err != nil:
		return nil, sizeError(err)
	}
	if !large.take() {
		return nil, errBusy
	}
	if _, err := buf.ReadFrom(in); err != nil {
		large.give()
		return nil, sizeError(err)
	}
	return &body{bytes: buf.Bytes(), large: large}, nil
}

func sizeError(err error) error {
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return errTooLarge
	}
	return err
}

// skipBody is for answers that need no body. What is small is read, so that the
// connection can be kept; of the rest nothing is, and the server is told to close
// the connection slowly enough for the answer to arrive, which it does not do by
// itself where the machine asked to close it.
func skipBody(w *counted, r *http.Request) {
	limit := int64(0)
	if r.ContentLength >= 0 && r.ContentLength <= smallBody {
		limit = smallBody
	}
	_, _ = io.Copy(io.Discard, http.MaxBytesReader(w.ResponseWriter, r.Body, limit)) // its error is why it is called
}
