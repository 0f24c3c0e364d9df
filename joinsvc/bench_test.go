package joinsvc_test

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/better-compute/join-operator/api/wire"
	"github.com/better-compute/join-operator/test/pgtest"
)

// BenchmarkJoin is a plain token join, from the decoded envelope to the committed
// certificate, on a Postgres that syncs to disk: many machines with one token, and
// each with its own. Machines are made beforehand. It reports the CPU that this
// process and Postgres spend on each.
func BenchmarkJoin(b *testing.B) {
	b.Run("one-token", func(b *testing.B) {
		benchmarkJoin(b, func(s *system) func() issued {
			token := s.token(uses(1_000_000))
			return func() issued { return token }
		})
	})
	b.Run("a-token-each", func(b *testing.B) {
		benchmarkJoin(b, func(s *system) func() issued { return func() issued { return s.token() } })
	})
}

func benchmarkJoin(b *testing.B, tokens func(*system) func() issued) {
	s := newSystem(b, pgtest.OnServer(pgtest.NewServer(b)))
	r := s.replica()
	token := tokens(s)
	joins := make([]*wire.Join, b.N)
	for i := range joins {
		joins[i] = s.envelope(newMachine(b), "", wire.RoleNode, &wire.Sealed{Token: token().text})
	}
	for range 50 {
		r.joins(newMachine(b), token())
	}
	s.exec(`VACUUM ANALYZE`)
	b.ReportAllocs()
	b.SetParallelism(4)
	postgres, self := s.postgresCPU(), selfCPU(b)
	b.ResetTimer()
	var next atomic.Int64
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, err := r.Join(b.Context(), joins[next.Add(1)-1], here); err != nil {
				b.Error(err)
			}
		}
	})
	b.StopTimer()
	per := func(d time.Duration) float64 { return float64(d.Microseconds()) / float64(b.N) }
	b.ReportMetric(per(s.postgresCPU()-postgres), "postgres-µs/op")
	b.ReportMetric(per(selfCPU(b)-self), "service-µs/op")
}

// postgresCPU is what the server's processes that live now have spent.
func (s *system) postgresCPU() time.Duration {
	s.Helper()
	var total time.Duration
	for _, pid := range one[[]int](s, `SELECT array_agg(pid) FROM pg_stat_activity`) {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue // it ended
		}
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		for _, ticks := range fields[11:13] { // utime and stime, proc(5)
			n, err := strconv.ParseInt(ticks, 10, 64)
			s.must(err)
			total += time.Duration(n) * 10 * time.Millisecond
		}
	}
	return total
}

func selfCPU(tb testing.TB) time.Duration {
	tb.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		tb.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
