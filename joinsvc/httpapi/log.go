package httpapi

import (
	"context"
	"crypto/rand"
	"log/slog"
	"net/http"
)

// idHeader is where the gateway says by which id it logs a request.
const idHeader = "X-Request-Id"

type idKey struct{}

// withID gives a request an id: the gateway's, or one of its own.
func withID(ctx context.Context, r *http.Request) context.Context {
	id := r.Header.Get(idHeader)
	if !plain(id) {
		id = rand.Text()[:16]
	}
	return context.WithValue(ctx, idKey{}, id)
}

// plain keeps ids to what is safe in a log.
func plain(id string) bool {
	if len(id) == 0 || len(id) > 64 {
		return false
	}
	for _, c := range []byte(id) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-':
		default:
			return false
		}
	}
	return true
}

// LogHandler adds the id of the request that a record speaks of, so that all that
// a join left in the logs of all processes is found by it.
func LogHandler(h slog.Handler) slog.Handler { return logHandler{h} }

type logHandler struct{ slog.Handler }

func (h logHandler) Handle(ctx context.Context, r slog.Record) error {
	if id, ok := ctx.Value(idKey{}).(string); ok {
		r = r.Clone()
		r.AddAttrs(slog.String("request_id", id))
	}
	return h.Handler.Handle(ctx, r)
}

func (h logHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return logHandler{h.Handler.WithAttrs(attrs)}
}

func (h logHandler) WithGroup(name string) slog.Handler {
	return logHandler{h.Handler.WithGroup(name)}
}
