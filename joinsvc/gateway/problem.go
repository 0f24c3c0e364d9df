package gateway

import (
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/better-compute/join-operator/api/wire"
)

// problem answers with a problem of the gateway's own (RFC 9457). retryAfter is
// rounded up to seconds; zero says nothing.
func problem(w http.ResponseWriter, code wire.Code, retryAfter time.Duration) {
	body, err := json.Marshal(code.Problem(""))
	if err != nil {
		panic(err) // strings and a number
	}
	header := w.Header()
	header.Set("Content-Type", wire.MediaTypeProblem)
	header.Set("Content-Length", strconv.Itoa(len(body)))
	header.Set("Cache-Control", "no-store")
	if retryAfter > 0 {
		header.Set("Retry-After", strconv.FormatInt(int64((retryAfter+time.Second-1)/time.Second), 10))
	}
	w.WriteHeader(code.Status())
	_, _ = w.Write(body) // a machine that is gone asks again
}
