package rules

import (
	"fmt"
	"maps"
	"slices"
	"time"
	"unicode/utf8"

	"cel.dev/cel-go/cel"
)

// Type is the type of a variable.
type Type int

// The types of variables, and the Go types of their values.
const (
	String     Type = iota // string
	Int                    // int64
	Bool                   // bool
	Time                   // time.Time, timestamp in CEL
	Bytes                  // []byte
	StringList             // []string
	StringMap              // map[string]string
)

// Variables are what the rules of one attestor type may speak of, by name. A name
// may have dots ("tpm.manufacturer").
type Variables map[string]Type

// The variables that rules of every attestor may speak of.
const (
	// FactsVariable is [attestors.Admit].Facts.
	FactsVariable = "facts"
	// RoleVariable is the role that the machine asks for.
	RoleVariable = "role"
	// HardwareKeyVariable is the SHA-256 of the hardware key that was proved, in
	// lower-case hexadecimal; empty where none was.
	HardwareKeyVariable = "hardwareKeySHA256"
)

var standard = Variables{FactsVariable: StringMap, RoleVariable: String, HardwareKeyVariable: String}

// What a value may hold; costs are estimated by it.
const (
	maxString  = 1024 // characters, bytes of Bytes
	maxEntries = 64   // of lists and maps
	maxKey     = 256  // characters of a map's key
)

// with is the variables and the standard ones.
func (v Variables) with() (Variables, error) {
	all := maps.Clone(standard)
	for name, t := range v {
		if _, taken := all[name]; taken {
			return nil, fmt.Errorf("variable %s is every attestor's", name)
		}
		all[name] = t
	}
	return all, nil
}

func (t Type) cel() *cel.Type {
	switch t {
	case String:
		return cel.StringType
	case Int:
		return cel.IntType
	case Bool:
		return cel.BoolType
	case Time:
		return cel.TimestampType
	case Bytes:
		return cel.BytesType
	case StringList:
		return cel.ListType(cel.StringType)
	case StringMap:
		return cel.MapType(cel.StringType, cel.StringType)
	}
	panic(fmt.Sprintf("rules: type %d", t))
}

// misfit says that a value is not what its variable may hold. A bug is the
// attestor's own; a value that is too large may be the machine's.
type misfit struct {
	name, why string
	bug       bool
}

func (m *misfit) Error() string { return fmt.Sprintf("variable %s: %s", m.name, m.why) }

// check holds values against the variables. Those that are missing are: an
// expression that speaks of one errs.
func (v Variables) check(values map[string]any) *misfit {
	for _, name := range slices.Sorted(maps.Keys(values)) {
		t, declared := v[name]
		if !declared {
			return &misfit{name, "it is not declared", true}
		}
		if why, bug := t.holds(values[name]); why != "" {
			return &misfit{name, why, bug}
		}
	}
	return nil
}

// holds says why a value does not fit.
func (t Type) holds(value any) (why string, bug bool) {
	typed := false
	switch x := value.(type) {
	case string:
		typed, why = t == String, text(x, maxString)
	case int64:
		typed = t == Int
	case bool:
		typed = t == Bool
	case time.Time:
		typed = t == Time
	case []byte:
		typed = t == Bytes
		if len(x) > maxString {
			why = fmt.Sprintf("it has %d bytes, more than %d", len(x), maxString)
		}
	case []string:
		typed, why = t == StringList, entries(len(x))
		for i := 0; why == "" && i < len(x); i++ {
			why = text(x[i], maxString)
		}
	case map[string]string:
		typed, why = t == StringMap, entries(len(x))
		if why != "" {
			break
		}
		for k, e := range x {
			if why = text(k, maxKey); why == "" {
				why = text(e, maxString)
			}
			if why != "" {
				break
			}
		}
	}
	if !typed {
		return fmt.Sprintf("a value of type %T is not what was declared", value), true
	}
	return why, false
}

func text(s string, limit int) string {
	switch {
	case len(s) > 4*limit, utf8.RuneCountInString(s) > limit:
		return fmt.Sprintf("it has a text of more than %d characters", limit)
	case !utf8.ValidString(s):
		return "it has a text that is not UTF-8"
	}
	return ""
}

func entries(n int) string {
	if n > maxEntries {
		return fmt.Sprintf("it has %d entries, more than %d", n, maxEntries)
	}
	return ""
}
