package rules

import (
	"errors"
	"fmt"
	"regexp/syntax"
	"strings"

	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/checker"
	"cel.dev/cel-go/common/ast"
	"cel.dev/cel-go/common/overloads"
	"cel.dev/cel-go/common/types"
)

// Rule is one rule: what must be true, and where it sends the machine.
type Rule struct {
	Name string
	// When is a CEL expression of type bool.
	When string
	// Tenant, Pool and Site are taken as they are.
	Tenant, Pool, Site string
}

const (
	// MaxRules bounds a set.
	MaxRules = 64
	// MaxWhen bounds an expression, in bytes.
	MaxWhen = 2048

	// maxRuleCost bounds what one expression may cost, as estimated beforehand and as
	// counted while it runs. A unit is about 0.1 µs.
	maxRuleCost = 100_000
	// maxSetCost bounds all expressions of a set together, by their estimates.
	maxSetCost = 1_000_000
	// maxNesting bounds comprehensions within comprehensions.
	maxNesting = 2
	// maxNodes and maxDepth bound the parsed expression.
	maxNodes, maxDepth = 1000, 50
	// maxPattern bounds the steps that a pattern compiles to.
	maxPattern = 1000
	// checkEvery is after how many iterations an expression looks at its deadline.
	checkEvery = 100
)

// CompileError says which rule does not compile, and why.
type CompileError struct {
	// Index of the rule in the list.
	Index int
	// Reason says what is wrong with its expression, and where.
	Reason string
}

func (e *CompileError) Error() string { return fmt.Sprintf("rules[%d].when: %s", e.Index, e.Reason) }

// Set is compiled rules, in their order. It does not change, and may be used by
// many joins at once.
type Set struct {
	variables Variables
	rules     []compiled
}

type compiled struct {
	Rule
	index   int
	program cel.Program
	source  *ast.SourceInfo
	// cost is the most that it is estimated to cost.
	cost uint64
}

// Compile compiles rules over the variables of an attestor type and those of all.
// Its error is a [*CompileError] where a rule is at fault.
func Compile(v Variables, list []Rule) (*Set, error) {
	if len(list) > MaxRules {
		return nil, fmt.Errorf("%d rules, more than %d", len(list), MaxRules)
	}
	all, err := v.with()
	if err != nil {
		return nil, err
	}
	env, err := environment(all)
	if err != nil {
		return nil, err
	}
	s := &Set{variables: all}
	var total uint64
	for i, r := range list {
		c, err := compile(env, all, r)
		if err != nil {
			return nil, &CompileError{i, err.Error()}
		}
		if total += c.cost; total > maxSetCost {
			return nil, &CompileError{i, fmt.Sprintf("the rules up to this one may cost %d, more than %d in all", total, maxSetCost)}
		}
		c.index = i
		s.rules = append(s.rules, *c)
	}
	return s, nil
}

func environment(v Variables) (*cel.Env, error) {
	options := []cel.EnvOption{
		cel.StdLib(),
		cel.DefaultUTCTimeZone(true),
		cel.EagerlyValidateDeclarations(true),
		cel.ParserExpressionSizeLimit(MaxWhen),
		cel.ParserRecursionLimit(maxDepth),
		cel.ExpressionNodeLimit(maxNodes),
		cel.ExpressionNestingDepthLimit(maxDepth),
		cel.ASTValidators(
			cel.ValidateDurationLiterals(), cel.ValidateTimestampLiterals(), cel.ValidateRegexLiterals(),
			cel.ValidateHomogeneousAggregateLiterals(), cel.ValidateComprehensionNestingLimit(maxNesting),
		),
	}
	for name, t := range v {
		options = append(options, cel.Variable(name, t.cel()))
	}
	env, err := cel.NewCustomEnv(options...)
	if err != nil {
		return nil, fmt.Errorf("environment of the rules: %w", err)
	}
	return env, nil
}

func compile(env *cel.Env, v Variables, r Rule) (*compiled, error) {
	switch {
	case strings.TrimSpace(r.When) == "":
		return nil, errors.New("there is no expression; what is always to match says so: true")
	case len(r.When) > MaxWhen:
		return nil, fmt.Errorf("it has %d bytes, more than %d", len(r.When), MaxWhen)
	}
	checked, issues := env.Compile(r.When)
	if err := issues.Err(); err != nil {
		return nil, errors.New(said(issues))
	}
	if !checked.OutputType().IsExactType(cel.BoolType) {
		return nil, fmt.Errorf("it is of type %s where bool is wanted", checked.OutputType())
	}
	native := checked.NativeRep()
	if err := checkPatterns(native); err != nil {
		return nil, err
	}
	estimate, err := env.EstimateCost(checked, sizes{v})
	if err != nil {
		return nil, fmt.Errorf("its cost cannot be estimated: %w", err)
	}
	if estimate.Max > maxRuleCost {
		return nil, fmt.Errorf("it may cost more than %d: loops within loops over long texts do; compare directly, or with one pattern", maxRuleCost)
	}
	program, err := env.Program(checked,
		cel.EvalOptions(cel.OptOptimize), cel.CostLimit(maxRuleCost), cel.InterruptCheckFrequency(checkEvery))
	if err != nil {
		return nil, err
	}
	return &compiled{Rule: r, program: program, source: native.SourceInfo(), cost: estimate.Max}, nil
}

// said is what is wrong with an expression, in one line for each mistake.
func said(issues *cel.Issues) string {
	const most = 5
	var lines []string
	for i, e := range issues.Errors() {
		if i == most {
			lines = append(lines, "and more")
			break
		}
		lines = append(lines, fmt.Sprintf("%s: %s", position(e.Location.Line(), e.Location.Column()), e.Message))
	}
	return strings.Join(lines, "; ")
}

// position is where something is in an expression; CEL counts columns from 0.
func position(line, column int) string {
	return fmt.Sprintf("line %d, column %d", line, column+1)
}

// checkPatterns refuses patterns that are made while a rule runs (their cost is
// nobody's to know, and one that a machine has a hand in matches what it likes), and
// those that are too large once repetitions are written out. CEL's own limit of that
// kind panics where a pattern has a repetition (v0.32.0).
func checkPatterns(a *ast.AST) error {
	var wrong error
	ast.PostOrderVisit(a.Expr(), ast.NewExprVisitor(func(e ast.Expr) {
		if e.Kind() != ast.CallKind || e.AsCall().FunctionName() != overloads.Matches {
			return
		}
		if why := pattern(e.AsCall().Args()); why != "" {
			at := a.SourceInfo().GetStartLocation(e.ID())
			wrong = fmt.Errorf("%s: %s", position(at.Line(), at.Column()), why)
		}
	}))
	return wrong
}

// pattern says what is wrong with the pattern of a call to matches().
func pattern(args []ast.Expr) string {
	last := args[len(args)-1]
	text, literal := "", last.Kind() == ast.LiteralKind
	if literal {
		text, literal = last.AsLiteral().Value().(string)
	}
	if !literal {
		return "the pattern of matches() must be a literal"
	}
	parsed, err := syntax.Parse(text, syntax.Perl)
	if err != nil {
		return "the pattern of matches() is none: " + err.Error()
	}
	program, err := syntax.Compile(parsed.Simplify())
	switch {
	case err != nil:
		return "the pattern of matches() is none: " + err.Error()
	case len(program.Inst) > maxPattern:
		return fmt.Sprintf("the pattern of matches() is of %d steps once its repetitions are written out, more than %d", len(program.Inst), maxPattern)
	}
	return ""
}

// sizes tells the estimate how large values may be.
type sizes struct{ variables Variables }

func (s sizes) EstimateSize(n checker.AstNode) *checker.SizeEstimate {
	path := n.Path()
	if len(path) == 0 {
		return nil
	}
	most := uint64(maxEntries)
	switch {
	case path[len(path)-1] == "@keys":
		most = maxKey
	case n.Type().Kind() == types.StringKind, n.Type().Kind() == types.BytesKind:
		most = maxString
	}
	return &checker.SizeEstimate{Min: 0, Max: most}
}

func (sizes) EstimateCallCost(string, string, *checker.AstNode, []checker.AstNode) *checker.CallEstimate {
	return nil
}
