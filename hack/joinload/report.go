package main

import (
	"fmt"
	"io"
	"slices"
	"time"
)

// result is one round.
type result struct {
	label      string
	perSecond  float64
	p50, p99   time.Duration
	cpu        cpuTimes // per join
	failed     int
	firstError error
}

func summarise(outcomes []outcome, took time.Duration, cpu cpuTimes) result {
	var r result
	var times []time.Duration
	for _, o := range outcomes {
		if o.err != nil {
			if r.failed++; r.firstError == nil {
				r.firstError = o.err
			}
			continue
		}
		times = append(times, o.took)
	}
	r.perSecond = float64(len(times)) / took.Seconds()
	if len(times) > 0 {
		slices.Sort(times)
		r.p50, r.p99 = times[len(times)/2], times[len(times)*99/100]
	}
	r.cpu = cpuTimes{}
	for part, t := range cpu {
		r.cpu[part] = t / time.Duration(max(len(times), 1))
	}
	return r
}

type table struct {
	out      io.Writer
	markdown bool
	headed   bool
}

func newTable(out io.Writer, markdown bool) *table { return &table{out: out, markdown: markdown} }

var columns = []string{"gateway", "join service", "Postgres"}

func (t *table) add(r result) {
	if !t.headed {
		t.headed = true
		t.row("round", "joins/s", "p50 ms", "p99 ms", "gateway", "join service", "Postgres", "together", self)
		if t.markdown {
			t.row("---", "---:", "---:", "---:", "---:", "---:", "---:", "---:", "---:")
		}
	}
	cells := []string{r.label, fmt.Sprintf("%.0f", r.perSecond), ms(r.p50), ms(r.p99)}
	var together time.Duration
	for _, c := range columns {
		cells = append(cells, ms(r.cpu[c]))
		together += r.cpu[c]
	}
	t.row(append(cells, ms(together), ms(r.cpu[self]))...)
}

func (t *table) ratio(r float64) {
	fmt.Fprintf(t.out, "\nOne token for all joins runs at %.2f of the rate of a token each (median of the rounds).\n", r)
}

func (t *table) row(cells ...string) {
	format := "%-44s %9s %8s %8s %9s %13s %9s %9s %9s\n"
	if t.markdown {
		format = "| %s | %s | %s | %s | %s | %s | %s | %s | %s |\n"
	}
	args := make([]any, len(cells))
	for i, c := range cells {
		args[i] = c
	}
	fmt.Fprintf(t.out, format, args...)
}

func ms(d time.Duration) string { return fmt.Sprintf("%.2f", float64(d)/float64(time.Millisecond)) }

func median(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(v))
	return s[len(s)/2]
}
