//! Plots of the HTML report as SVG, in the text color of the page. No other file depends on the plotting library.

use std::ops::Range;
use std::time::Duration;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::measure::{HistogramBar, Latency, format_bytes, format_duration};

// Plot units per pixel: shapes at whole units are drawn sharply.
const SCALE: u32 = 2;
const HEIGHT: u32 = 230 * SCALE;
// Height of a row with a name.
const ROW: u32 = 22 * SCALE;
const FONT: (&str, u32) = ("sans-serif", 14 * SCALE);
// Width of the labels of the vertical axis.
const LEFT: u32 = 62 * SCALE;
const BELOW: u32 = 26 * SCALE;
// Minimum distance between two labels of marks, as a share of the axis.
const MARK_GAP: f64 = 0.12;
// Black as written by plotters. The page replaces it by its text color, because it may be dark.
const INK: &str = "#000000";

// SVG text, or an error message that the page shows in place of the plot.
pub(super) type PlotResult = Result<String, String>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PlotWidth {
    Half,
    Full,
}

impl PlotWidth {
    fn units(self) -> u32 {
        match self {
            Self::Half => 560 * SCALE,
            Self::Full => 1140 * SCALE,
        }
    }
}

// Red, green and blue.
pub(super) type Colour = (u8, u8, u8);

pub(super) fn hex((red, green, blue): Colour) -> String {
    format!("#{red:02x}{green:02x}{blue:02x}")
}

#[derive(Debug, Clone)]
pub(super) struct PlotCurve {
    pub(super) name: String,
    pub(super) colour: Colour,
    // One value for each time of `Times`.
    pub(super) values: Vec<f64>,
}

// Time axis in seconds, and the marks on it.
pub(super) struct TimeAxis<'a> {
    pub(super) seconds: &'a [f64],
    pub(super) marks: &'a [(f64, String)],
}

impl TimeAxis<'_> {
    fn last(&self) -> f64 {
        self.seconds.last().copied().unwrap_or_default().max(1.0)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PlotUnit {
    Count,
    Bytes,
    Microseconds,
}

impl PlotUnit {
    fn format_value(self, value: f64) -> String {
        let value = value.max(0.0);
        match self {
            Self::Count => format_count(value),
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a positive number of bytes")]
            Self::Bytes => trim_zeros(&format_bytes(value as u64)),
            Self::Microseconds => trim_zeros(&format_duration(Duration::from_secs_f64(value / 1e6))),
        }
    }

    // Divisor of the axis labels, so that they are round numbers in the displayed unit.
    fn base(self, top: f64) -> f64 {
        match self {
            Self::Bytes if top >= 1024.0 * 1024.0 * 1024.0 => 1024.0 * 1024.0 * 1024.0,
            Self::Bytes if top >= 1024.0 * 1024.0 => 1024.0 * 1024.0,
            Self::Bytes if top >= 1024.0 => 1024.0,
            Self::Count | Self::Bytes | Self::Microseconds => 1.0,
        }
    }
}

// A single curve is drawn with a filled area.
pub(super) fn lines(width: PlotWidth, times: &TimeAxis<'_>, curves: &[PlotCurve], unit: PlotUnit) -> PlotResult {
    let top = curves.iter().flat_map(|curve| &curve.values).copied().fold(0.0, f64::max);
    draw(width, HEIGHT, |area| {
        let mut chart = time_chart(area, times, top, unit)?;
        for curve in curves {
            let points = || times.seconds.iter().copied().zip(curve.values.iter().copied());
            if curves.len() == 1 {
                chart.draw_series(AreaSeries::new(points(), 0.0, colour(curve.colour).mix(0.2)))?;
            }
            chart.draw_series(LineSeries::new(points(), colour(curve.colour).stroke_width(SCALE)))?;
        }
        marks(&mut chart, times, top)
    })
}

// The first layer is at the bottom.
pub(super) fn stack(width: PlotWidth, times: &TimeAxis<'_>, layers: &[PlotCurve]) -> PlotResult {
    let total = |nth: usize| layers.iter().filter_map(|layer| layer.values.get(nth)).sum::<f64>();
    let top = (0..times.seconds.len()).map(total).fold(0.0, f64::max);
    draw(width, HEIGHT, |area| {
        let mut chart = time_chart(area, times, top, PlotUnit::Count)?;
        let mut below = vec![0.0; times.seconds.len()];
        for layer in layers {
            let above: Vec<f64> = below.iter().zip(&layer.values).map(|(below, value)| below + value).collect();
            let there = times.seconds.iter().copied().zip(above.iter().copied());
            let back = times.seconds.iter().copied().zip(below.iter().copied()).rev();
            let outline: Vec<(f64, f64)> = there.chain(back).collect();
            chart.draw_series([Polygon::new(outline, colour(layer.colour).filled())])?;
            below = above;
        }
        marks(&mut chart, times, top)
    })
}

/// Draws overlaid histograms on a logarithmic axis, each in percent of its own count.
pub(super) fn histogram(width: PlotWidth, all: &[(Colour, &Latency)]) -> PlotResult {
    let all: Vec<(Colour, Vec<HistogramBar>)> = all.iter().map(|(colour, latency)| (*colour, latency.bars())).collect();
    let share = |bars: &[HistogramBar], bar: &HistogramBar| {
        bar.count as f64 * 100.0 / bars.iter().map(|bar| bar.count).sum::<u64>().max(1) as f64
    };
    let tallest = all.iter().flat_map(|(_, bars)| bars.iter().map(|bar| share(bars, bar))).fold(1.0, f64::max);
    let range = range(all.iter().flat_map(|(_, bars)| bars).flat_map(|bar| [bar.from, bar.until]));
    draw(width, HEIGHT, |area| {
        let x = PlotAxis { range: range.0..range.1, ticks: decades(range) };
        let y = PlotAxis { range: 0.0..axis_top(tallest), ticks: round_numbers(tallest, 1.0) };
        let mut chart = frame(area, LEFT).build_cartesian_2d(x, y)?;
        let percent = |share: &f64| format!("{} %", format_tenth(*share));
        mesh(&mut chart, &|at: &f64| format_log_duration(*at), &percent)?;
        for (fill, bars) in &all {
            let bar = |bar: &HistogramBar| {
                let corners = [(log(bar.from), 0.0), (log(bar.until), share(bars, bar))];
                Rectangle::new(corners, colour(*fill).mix(if all.len() == 1 { 0.85 } else { 0.55 }).filled())
            };
            chart.draw_series(bars.iter().filter(|bar| bar.count > 0).map(bar))?;
        }
        Ok(())
    })
}

/// Draws a row for each name: a line from minimum to maximum, a bar up to the 90th percentile and a mark at the median.
pub(super) fn spans(width: PlotWidth, rows: &[(String, Colour, &Latency)]) -> PlotResult {
    let range = range(rows.iter().flat_map(|(_, _, all)| [all.quantile(0.0), all.quantile(1.0)]));
    // The first row is at the top.
    let place = |nth: usize| (rows.len() - nth) as f64 - 0.5;
    let height = BELOW + ROW * u32::try_from(rows.len() + 1).unwrap_or(u32::MAX / ROW - 2);
    draw(width, height, |area| {
        let x = PlotAxis { range: range.0..range.1, ticks: decades(range) };
        let y = PlotAxis { range: 0.0..rows.len().max(1) as f64, ticks: (0..rows.len()).map(place).collect() };
        let mut chart = frame(area, LEFT * 2).build_cartesian_2d(x, y)?;
        let name = |at: &f64| {
            let nth = (0..rows.len()).find(|nth| (place(*nth) - at).abs() < 0.1);
            nth.map(|nth| rows[nth].0.clone()).unwrap_or_default()
        };
        mesh(&mut chart, &|at: &f64| format_log_duration(*at), &name)?;
        for (nth, (_, fill, latency)) in rows.iter().enumerate() {
            let (middle, fill) = (place(nth), colour(*fill));
            let of = |share| log(latency.quantile(share));
            let half = 0.28;
            chart.draw_series([
                Rectangle::new([(of(0.0), middle - 0.04), (of(1.0), middle + 0.04)], fill.mix(0.6).filled()),
                Rectangle::new([(of(0.0), middle - half), (of(0.9), middle + half)], fill.mix(0.45).filled()),
            ])?;
            let median = [(of(0.5), middle - half), (of(0.5), middle + half)];
            chart.draw_series([PathElement::new(median, fill.stroke_width(2 * SCALE))])?;
        }
        Ok(())
    })
}

// ---- shared parts ----

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Failure = DrawingAreaErrorKind<<SVGBackend<'static> as DrawingBackend>::ErrorType>;

fn draw(width: PlotWidth, height: u32, plot: impl FnOnce(&Area<'_>) -> Result<(), Failure>) -> PlotResult {
    let size = (width.units(), height);
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, size).into_drawing_area();
        plot(&area).and_then(|()| area.present()).map_err(|error| error.to_string())?;
    }
    // The page sets the size and the text color.
    let inside = text.split_once('>').map_or("", |(_, inside)| inside);
    let svg = format!("<svg viewBox=\"0 0 {} {}\" role=\"img\">{inside}", size.0, size.1);
    Ok(svg.replace(&format!("\"{INK}\""), "\"currentColor\""))
}

fn frame<'a, 'b>(area: &'a Area<'b>, left: u32) -> ChartBuilder<'a, 'a, SVGBackend<'b>> {
    let mut builder = ChartBuilder::on(area);
    builder.margin_top(20 * SCALE).margin_right(16 * SCALE).x_label_area_size(BELOW).y_label_area_size(left);
    builder
}

// Axis with labels at given positions.
struct PlotAxis {
    range: Range<f64>,
    ticks: Vec<f64>,
}

impl Ranged for PlotAxis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (from, to): (i32, i32)) -> i32 {
        let share = (value - self.range.start) / (self.range.end - self.range.start).max(f64::MIN_POSITIVE);
        #[expect(clippy::cast_possible_truncation, reason = "coordinates within a plot")]
        let along = (f64::from(to - from) * share).round() as i32;
        from + along
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.clone()
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

type PlotChart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<PlotAxis, PlotAxis>>;

fn time_chart<'a, 'b>(
    area: &'a Area<'b>,
    times: &TimeAxis<'_>,
    top: f64,
    unit: PlotUnit,
) -> Result<PlotChart<'a, 'b>, Failure> {
    let first = times.seconds.first().copied().unwrap_or_default().min(times.last() - 1.0);
    let x = PlotAxis { range: first..times.last(), ticks: ticks(first, times.last()) };
    let y = PlotAxis { range: 0.0..axis_top(top), ticks: round_numbers(top, unit.base(top)) };
    let mut chart = frame(area, LEFT).build_cartesian_2d(x, y)?;
    mesh(&mut chart, &|seconds: &f64| format_seconds(*seconds), &|value: &f64| unit.format_value(*value))?;
    Ok(chart)
}

// Leaves a margin above the curves.
fn axis_top(top: f64) -> f64 {
    if top > 0.0 { top * 1.06 } else { 1.0 }
}

fn mesh(
    chart: &mut PlotChart<'_, '_>,
    along: &dyn Fn(&f64) -> String,
    up: &dyn Fn(&f64) -> String,
) -> Result<(), Failure> {
    chart
        .configure_mesh()
        .x_label_formatter(along)
        .y_label_formatter(up)
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .axis_style(BLACK.mix(0.35).stroke_width(SCALE / 2))
        .label_style(TextStyle::from(FONT).color(&BLACK.mix(0.75)))
        .draw()
}

fn marks(chart: &mut PlotChart<'_, '_>, times: &TimeAxis<'_>, top: f64) -> Result<(), Failure> {
    let ink = BLACK.mix(0.75);
    let mut labelled = f64::NEG_INFINITY;
    for (at, name) in times.marks {
        let line = [(*at, 0.0), (*at, axis_top(top))];
        chart.draw_series(DashedLineSeries::new(line, 4 * SCALE, 3 * SCALE, BLACK.mix(0.45).into()))?;
        let share = at / times.last();
        // Labels must not overlap.
        if share - labelled < MARK_GAP {
            continue;
        }
        labelled = share;
        let anchor = if share > 0.8 { HPos::Right } else { HPos::Left };
        let style = TextStyle::from(FONT).color(&ink).pos(Pos::new(anchor, VPos::Bottom));
        chart.draw_series([Text::new(name.clone(), (*at, axis_top(top)), style)])?;
    }
    Ok(())
}

fn colour((red, green, blue): Colour) -> RGBColor {
    RGBColor(red, green, blue)
}

// At most six multiples of 1, 2 or 5 times a power of ten, in units of `base`, from 0 on.
fn round_numbers(top: f64, base: f64) -> Vec<f64> {
    let top = top.max(f64::MIN_POSITIVE) / base;
    let power = 10f64.powf((top / 5.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * power).into_iter().find(|step| top / step <= 5.0);
    let step = step.unwrap_or(power * 10.0) * base;
    (0..=5).map(|nth| f64::from(nth) * step).take_while(|at| *at <= top * base * 1.06).collect()
}

// At most nine round times, in seconds.
fn ticks(from: f64, until: f64) -> Vec<f64> {
    const STEPS: [u32; 16] = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 43_200];
    let step = STEPS.into_iter().map(f64::from).find(|step| until / step <= 8.0).unwrap_or(86_400.0);
    (0..=8).map(|nth| f64::from(nth) * step).filter(|at| (from..=until).contains(at)).collect()
}

fn format_seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 3600.0 => format!("{} h", format_tenth(s / 3600.0)),
        s if s >= 60.0 && s % 60.0 == 0.0 => format!("{} min", format_tenth(s / 60.0)),
        s => format!("{} s", format_tenth(s)),
    }
}

fn format_tenth(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map(str::to_owned).unwrap_or(text)
}

fn format_count(value: f64) -> String {
    match value {
        v if v >= 1e6 => format!("{} M", format_tenth(v / 1e6)),
        v if v >= 1e4 => format!("{} k", format_tenth(v / 1e3)),
        v => format_tenth(v),
    }
}

// Logarithm of the microseconds to base 10.
fn log(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).max(1.0).log10()
}

fn range(durations: impl Iterator<Item = Duration>) -> (f64, f64) {
    let (low, high) = durations.map(log).fold((f64::MAX, f64::MIN), |(low, high), at| (low.min(at), high.max(at)));
    if low > high { (3.0, 6.0) } else { (low - 0.05, high.max(low + 0.3) + 0.05) }
}

// Powers of ten, with their multiples by 2 and 5 if the range is small.
fn decades((low, high): (f64, f64)) -> Vec<f64> {
    let factors: &[f64] = if high - low > 3.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
    #[expect(clippy::cast_possible_truncation, reason = "an hour in microseconds has ten digits")]
    let exponents = low.floor() as i32..=high.ceil() as i32;
    let all = exponents.flat_map(|exponent| factors.iter().map(move |factor| f64::from(exponent) + factor.log10()));
    all.filter(|at| (low..=high).contains(at)).collect()
}

fn format_log_duration(at: f64) -> String {
    trim_zeros(&format_duration(Duration::from_secs_f64(10f64.powf(at) / 1e6)))
}

// Removes trailing zeros: `1.00 ms` becomes `1 ms`.
fn trim_zeros(text: &str) -> String {
    let (value, unit) = text.split_once(' ').unwrap_or((text, ""));
    let value = if value.contains('.') { value.trim_end_matches('0').trim_end_matches('.') } else { value };
    format!("{value} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_of_a_time_axis_are_few_and_round() {
        let written = |until| ticks(0.0, until).into_iter().map(format_seconds).collect::<Vec<_>>();
        assert_eq!(written(30.0), ["0 s", "5 s", "10 s", "15 s", "20 s", "25 s", "30 s"]);
        assert_eq!(written(1800.0), ["0 s", "5 min", "10 min", "15 min", "20 min", "25 min", "30 min"]);
        assert_eq!(written(72.0).last().unwrap(), "70 s");
        assert_eq!(written(3700.0).last().unwrap(), "1 h");
        assert!([0.5, 1.0, 7.0, 61.0, 1e4, 1e6].into_iter().all(|until| (1..=9).contains(&ticks(0.0, until).len())));
    }

    #[test]
    fn ticks_of_a_number_axis_are_round() {
        assert_eq!(round_numbers(1000.0, 1.0), [0.0, 200.0, 400.0, 600.0, 800.0, 1000.0]);
        assert_eq!(round_numbers(7.0, 1.0), [0.0, 2.0, 4.0, 6.0]);
        let memory = 70.0 * 1024.0 * 1024.0;
        let written =
            round_numbers(memory, PlotUnit::Bytes.base(memory)).into_iter().map(|at| PlotUnit::Bytes.format_value(at));
        assert_eq!(written.collect::<Vec<_>>(), ["0 B", "20 MiB", "40 MiB", "60 MiB"]);
        assert!(round_numbers(0.0, 1.0).len() <= 6);
    }

    #[test]
    fn ticks_of_a_logarithmic_axis_are_decades() {
        let written = |low: u64, high: u64| {
            let range = range([low, high].map(Duration::from_micros).into_iter());
            decades(range).into_iter().map(format_log_duration).collect::<Vec<_>>()
        };
        assert_eq!(written(1_000, 10_000_000), ["1 ms", "10 ms", "100 ms", "1 s", "10 s"]);
        assert_eq!(written(1_000, 20_000), ["1 ms", "2 ms", "5 ms", "10 ms", "20 ms"]);
    }

    #[test]
    fn plots_without_data_can_be_drawn() {
        let times = TimeAxis { seconds: &[], marks: &[] };
        let empty = PlotCurve { name: String::new(), colour: (0, 0, 0), values: Vec::new() };
        let drawn = [
            lines(PlotWidth::Half, &times, &[], PlotUnit::Count),
            lines(PlotWidth::Half, &times, std::slice::from_ref(&empty), PlotUnit::Bytes),
            stack(PlotWidth::Full, &times, &[empty]),
            histogram(PlotWidth::Half, &[((0, 0, 0), &Latency::default())]),
            spans(PlotWidth::Half, &[]),
            spans(PlotWidth::Half, &[("none".to_owned(), (0, 0, 0), &Latency::default())]),
        ];
        for svg in drawn {
            let svg = svg.unwrap();
            assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg}");
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
