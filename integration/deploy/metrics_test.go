package deploy

import (
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/promql/parser"
)

// Labels that a scrape adds: Prometheus' own, and `node` by the PodMonitor.
var scrapes = []string{"node", "job", "instance", "namespace", "pod", "container", "endpoint"}

// metrics are the names of docs/METRICS.md with their labels; a test of the program compares that document with its table.
func metrics(t *testing.T) map[string][]string {
	t.Helper()
	known := map[string][]string{"up": nil}
	row := regexp.MustCompile("(?m)^\\| `(union_csi_[a-z_]+)` \\| ([a-z]+) \\| (.*?) \\|")
	label := regexp.MustCompile("`([a-z_]+)`")
	for _, line := range row.FindAllStringSubmatch(read(t, "docs/METRICS.md"), -1) {
		var labels []string
		for _, l := range label.FindAllStringSubmatch(line[3], -1) {
			labels = append(labels, l[1])
		}
		if line[2] != "histogram" {
			known[line[1]] = labels
			continue
		}
		known[line[1]+"_bucket"] = append([]string{"le"}, labels...)
		known[line[1]+"_sum"], known[line[1]+"_count"] = labels, labels
	}
	if len(known) < 20 {
		t.Fatalf("docs/METRICS.md has only %d metrics", len(known))
	}
	return known
}

// check finds names and labels that no metric has. It returns the labels that the result may have.
func check(t *testing.T, known map[string][]string, where, query string) []string {
	t.Helper()
	for _, variable := range []string{"$__rate_interval", "$__interval", "$__range"} {
		query = strings.ReplaceAll(query, variable, "5m")
	}
	parsed, err := parser.NewParser(parser.Options{}).ParseExpr(query)
	if err != nil {
		t.Errorf("%s: %v in %s", where, err, query)
		return nil
	}
	all := slices.Clone(scrapes)
	parser.Inspect(parsed, func(node parser.Node, _ []parser.Node) error {
		selector, ok := node.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		labels, there := known[selector.Name]
		if !there {
			t.Errorf("%s: there is no metric %s", where, selector.Name)
		}
		all = append(all, labels...)
		for _, matcher := range selector.LabelMatchers {
			if matcher.Name != "__name__" && !slices.Contains(labels, matcher.Name) && !slices.Contains(scrapes, matcher.Name) {
				t.Errorf("%s: %s has no label %s", where, selector.Name, matcher.Name)
			}
		}
		return nil
	})
	result := all
	parser.Inspect(parsed, func(node parser.Node, path []parser.Node) error {
		var named []string
		switch n := node.(type) {
		case *parser.AggregateExpr:
			named = n.Grouping
			if n.Op != parser.TOPK && !n.Without && len(path) <= 2 {
				result = n.Grouping
			}
		case *parser.BinaryExpr:
			if n.VectorMatching != nil {
				named = append(slices.Clone(n.VectorMatching.MatchingLabels), n.VectorMatching.Include...)
			}
		}
		for _, label := range named {
			if !slices.Contains(all, label) {
				t.Errorf("%s: no metric in %s has the label %s", where, query, label)
			}
		}
		return nil
	})
	return result
}

func TestAlertsNameMetricsThatExistAndHaveARunbook(t *testing.T) {
	known, runbook := metrics(t), read(t, "docs/OPERATIONS.md")
	used := regexp.MustCompile(`\$labels\.([a-z_]+)`)
	rules := documents(t, read(t, "deploy/monitoring/rules.yaml"))[0]
	alerts := 0
	for _, group := range dig(rules, "spec", "groups").([]any) {
		for _, rule := range dig(group, "rules").([]any) {
			alerts++
			name, expression := dig(rule, "alert").(string), dig(rule, "expr").(string)
			labels := check(t, known, name, expression)
			for _, text := range dig(rule, "annotations").(map[string]any) {
				for _, label := range used.FindAllStringSubmatch(text.(string), -1) {
					if !slices.Contains(labels, label[1]) {
						t.Errorf("%s tells of the label %s, which its expression does not have", name, label[1])
					}
				}
			}
			if !strings.Contains(runbook, "### "+name+"\n") {
				t.Errorf("docs/OPERATIONS.md does not say what to do for %s", name)
			}
		}
	}
	for _, heading := range regexp.MustCompile(`(?m)^### (UnionCsi\w+)$`).FindAllStringSubmatch(runbook, -1) {
		if !strings.Contains(read(t, "deploy/monitoring/rules.yaml"), "alert: "+heading[1]+"\n") {
			t.Errorf("docs/OPERATIONS.md tells of %s, which is no alert", heading[1])
		}
	}
	if alerts < 5 {
		t.Errorf("only %d alerts were found", alerts)
	}
}

func TestTheDashboardAsksForMetricsThatExist(t *testing.T) {
	known := metrics(t)
	legend := regexp.MustCompile(`\{\{([a-z_]+)\}\}`)
	var dashboard map[string]any
	if err := json.Unmarshal([]byte(read(t, "deploy/monitoring/dashboard.json")), &dashboard); err != nil {
		t.Fatal(err)
	}
	queries := 0
	ids := map[float64]bool{}
	for _, panel := range dashboard["panels"].([]any) {
		id := dig(panel, "id").(float64)
		if ids[id] {
			t.Errorf("two panels have the id %v", id)
		}
		ids[id] = true
		targets, _ := dig(panel, "targets").([]any)
		for _, target := range targets {
			queries++
			title := dig(panel, "title").(string)
			labels := check(t, known, title, dig(target, "expr").(string))
			for _, label := range legend.FindAllStringSubmatch(dig(target, "legendFormat").(string), -1) {
				if !slices.Contains(labels, label[1]) {
					t.Errorf("%s: the legend has the label %s, which the query does not", title, label[1])
				}
			}
		}
	}
	if queries < 20 {
		t.Errorf("only %d queries were found", queries)
	}
	variable := regexp.MustCompile(`label_values\((\w+), node\)`)
	for _, found := range variable.FindAllStringSubmatch(read(t, "deploy/monitoring/dashboard.json"), -1) {
		if _, there := known[found[1]]; !there {
			t.Errorf("the variable asks for %s", found[1])
		}
	}
}
