#include "monitor/format.h"
#include "monitor/render.h"

namespace oxytorch::monitor {
namespace {

// Blue, vermilion, green, purple, amber and sky, after Okabe and Ito: told apart with any colour vision. Darkened or
// lightened until each has a contrast of at least 3 to 1 with its background.
constexpr const char* kStyle = R"css(
:root{color-scheme:light dark;--page:#fff;--ink:#1d2129;--soft:#5b6472;--faint:#e4e7ec;--panel:#f7f8fa;--rule:#cfd4dc;
--c0:#0068ad;--c1:#c8500a;--c2:#00805e;--c3:#a9528a;--c4:#a87400;--c5:#3b8fc4}
@media(prefers-color-scheme:dark){:root{--page:#14171c;--ink:#e6e9ee;--soft:#9aa4b2;--faint:#2a2f38;--panel:#1b1f26;
--rule:#3c434f;--c0:#5aaeea;--c1:#f08a4b;--c2:#35b98f;--c3:#dd8fc2;--c4:#e0b040;--c5:#8fd0f5}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
-webkit-text-size-adjust:100%}
main{max-width:1080px;margin:0 auto;padding:48px 32px 72px}
h1{font-size:30px;line-height:1.2;font-weight:650;letter-spacing:-.015em;margin:0 0 8px;overflow-wrap:anywhere}
.subtitle{font-size:17px;color:var(--soft);margin:0 0 20px;max-width:70ch}
h2{font-size:21px;line-height:1.3;font-weight:620;letter-spacing:-.01em;margin:48px 0 12px;overflow-wrap:anywhere}
h3{font-size:17px;font-weight:620;margin:32px 0 8px;overflow-wrap:anywhere}
p{margin:0 0 12px;max-width:74ch;overflow-wrap:anywhere}
dl.meta{display:flex;flex-wrap:wrap;gap:12px 36px;margin:20px 0 8px;padding:14px 0;border-top:1px solid var(--faint);
border-bottom:1px solid var(--faint)}
dl.meta div{min-width:0}
dl.meta dt{font-size:13px;color:var(--soft);margin:0}
dl.meta dd{margin:0;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
figure{margin:20px 0 28px}
figcaption{font-weight:600;font-size:15px;margin:0 0 8px}
.note{font-size:13.5px;color:var(--soft);margin:8px 0 0;max-width:80ch}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14.5px;font-variant-numeric:tabular-nums}
th,td{padding:7px 10px;text-align:left;vertical-align:top;white-space:pre-wrap}
th{font-weight:600;color:var(--soft);font-size:13px;border-bottom:1px solid var(--rule);white-space:normal;vertical-align:bottom}
th .unit{font-weight:400;white-space:nowrap}
td{border-bottom:1px solid var(--faint)}
tbody tr:last-child td{border-bottom:1px solid var(--rule)}
tbody tr:hover td{background:var(--panel)}
th:first-child,td:first-child{padding-left:2px}
th:last-child,td:last-child{padding-right:2px}
td.strong{font-weight:650}
.r{text-align:right!important}td.r{white-space:nowrap}.m{text-align:center!important}
pre{background:var(--panel);border:1px solid var(--faint);border-radius:6px;padding:12px 14px;overflow-x:auto;
font:13.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font:12.5px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;fill:var(--soft);font-variant-numeric:tabular-nums}
svg text.legend,svg text.value{fill:var(--ink)}
svg text.group{fill:var(--ink);font-weight:600;font-size:13.5px}
svg text.empty{font-size:14px}
.grid{stroke:var(--faint)}.axis{stroke:var(--rule)}
.curve{fill:none;stroke-width:1.9;stroke-linejoin:round;stroke-linecap:round;stroke:var(--c)}
.curve.dashed{stroke-dasharray:6 5}
.band{fill:var(--c);opacity:.17}.dot,.bar{fill:var(--c)}
.whisker{stroke:var(--ink);stroke-width:1.3}
.reference{stroke:var(--soft);stroke-dasharray:4 4}
.hover{fill:var(--c);stroke:var(--page);stroke-width:1.5;opacity:0}.hover:hover{opacity:1}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}
@media(max-width:640px){main{padding:28px 18px 48px}h1{font-size:25px}.chart{overflow-x:auto}.chart svg{min-width:560px}}
@media print{main{max-width:none;padding:0}figure{break-inside:avoid}}
)css";

const char* align_class(Align align) {
  switch (align) {
    case Align::Left: return "";
    case Align::Right: return "r";
    case Align::Center: return "m";
  }
  return "";
}

std::string class_attribute(const std::string& names) { return names.empty() ? "" : " class=\"" + names + "\""; }

void add_notes(std::string& out, const std::vector<std::string>& notes) {
  for (const std::string& note : notes) out += "<p class=\"note\">" + escape_html(note) + "</p>";
}

void add_caption(std::string& out, const std::string& title) {
  if (!title.empty()) out += "<figcaption>" + escape_html(title) + "</figcaption>";
}

void add(std::string& out, const Heading& heading) {
  const std::string tag = heading.level == 3 ? "h3" : "h2";
  out += "<" + tag + ">" + escape_html(heading.text) + "</" + tag + ">\n";
}

void add(std::string& out, const Paragraph& paragraph) { out += "<p>" + escape_html(paragraph.text) + "</p>\n"; }

void add(std::string& out, const Preformatted& block) { out += "<pre>" + escape_html(block.text) + "</pre>\n"; }

void add(std::string& out, const Table& table) {
  out += "<figure>";
  add_caption(out, table.title);
  out += "<div class=\"scroll\"><table><thead><tr>";
  for (const Column& column : table.columns) {
    out += "<th scope=\"col\"" + class_attribute(align_class(column.align)) + ">" + escape_html(column.title);
    if (!column.unit.empty()) out += " <span class=\"unit\">" + escape_html(column.unit) + "</span>";
    out += "</th>";
  }
  out += "</tr></thead><tbody>\n";
  for (const auto& row : table.rows) {
    out += "<tr>";
    for (std::size_t i = 0; i < row.size(); ++i) {
      std::string names = align_class(table.columns[i].align);
      if (row[i].strong) names += names.empty() ? "strong" : " strong";
      out += "<td" + class_attribute(names) + ">" + escape_html(row[i].text) + "</td>";
    }
    out += "</tr>\n";
  }
  out += "</tbody></table></div>";
  add_notes(out, table.notes);
  out += "</figure>\n";
}

template <class Chart>
void add_chart(std::string& out, const Chart& chart) {
  out += "<figure>";
  add_caption(out, chart.title);
  out += "<div class=\"chart\">" + render_svg(chart) + "</div>";
  add_notes(out, chart.notes);
  out += "</figure>\n";
}
void add(std::string& out, const LineChart& chart) { add_chart(out, chart); }
void add(std::string& out, const BarChart& chart) { add_chart(out, chart); }

}  // namespace

std::string escape_html(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (char c : valid_utf8(text)) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default:
        // XML has no other control characters, not even escaped.
        if ((static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') || c == 0x7F) {
          out += "\xEF\xBF\xBD";
        } else {
          out += c;
        }
    }
  }
  return out;
}

std::string render_html(const Report& report) {
  std::string out =
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<title>" +
      escape_html(report.title()) + "</title>\n<style>" + kStyle + "</style>\n</head>\n<body>\n<main>\n<h1>" +
      escape_html(report.title()) + "</h1>\n";
  if (!report.subtitle().empty()) out += "<p class=\"subtitle\">" + escape_html(report.subtitle()) + "</p>\n";
  if (!report.metadata().empty()) {
    out += "<dl class=\"meta\">";
    for (const auto& [name, value] : report.metadata()) {
      out += "<div><dt>" + escape_html(name) + "</dt><dd>" + escape_html(value) + "</dd></div>";
    }
    out += "</dl>\n";
  }
  for (const Block& block : report.blocks()) {
    std::visit([&out](const auto& one) { add(out, one); }, block);
  }
  return out + "</main>\n</body>\n</html>\n";
}

}  // namespace oxytorch::monitor
