//! Plot of the cost of an instance against the size of its fleet, as SVG.

use std::time::Duration;

use plotters::chart::LabelAreaPosition;
use plotters::prelude::*;

/// Cost of one instance in a fleet of this size.
pub(crate) struct FleetCost {
    pub(crate) servers: usize,
    /// Wall time until all are online, divided by their number.
    pub(crate) online: Duration,
    pub(crate) cpu: Duration,
    pub(crate) kib: f64,
}

const SIZE: (u32, u32) = (1140, 360);
const FONT: (&str, u32) = ("sans-serif", 16);
const TIME: RGBColor = RGBColor(0x1f, 0x77, 0xb4);
const CPU: RGBColor = RGBColor(0xd6, 0x5f, 0x0e);
const MEMORY: RGBColor = RGBColor(0x2c, 0x8a, 0x3c);

/// Draws times on the left and memory on the right, each over a logarithmic axis of sizes.
pub(crate) fn svg(costs: &[FleetCost]) -> String {
    let microseconds = |time: Duration| time.as_secs_f64() * 1e6;
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        // The page may be dark.
        area.fill(&WHITE).unwrap();
        let (left, right) = area.split_horizontally(SIZE.0 / 2);
        let times = [
            ("time to online", TIME, costs.iter().map(|cost| microseconds(cost.online)).collect::<Vec<_>>()),
            ("CPU time", CPU, costs.iter().map(|cost| microseconds(cost.cpu)).collect()),
        ];
        draw(&left, "time per instance, µs", costs, &times);
        let memory = [("RSS", MEMORY, costs.iter().map(|cost| cost.kib).collect::<Vec<_>>())];
        draw(&right, "memory per instance, KiB", costs, &memory);
        area.present().unwrap();
    }
    text
}

type PlotArea<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn draw(area: &PlotArea<'_>, title: &str, costs: &[FleetCost], curves: &[(&str, RGBColor, Vec<f64>)]) {
    let sizes = costs.iter().map(|cost| cost.servers as f64);
    let (smallest, largest) = (sizes.clone().fold(f64::MAX, f64::min), sizes.clone().fold(0.0, f64::max));
    let top = curves.iter().flat_map(|(_, _, values)| values).copied().fold(0.0, f64::max) * 1.15;
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .caption(title, FONT)
        .set_label_area_size(LabelAreaPosition::Left, 56)
        .set_label_area_size(LabelAreaPosition::Bottom, 44)
        .build_cartesian_2d((smallest..largest).log_scale(), 0.0..top)
        .unwrap();
    chart
        .configure_mesh()
        .x_desc("instances")
        .x_labels(costs.len())
        .x_label_formatter(&|size| format!("{size:.0}"))
        .y_label_formatter(&|value| format!("{value:.0}"))
        .light_line_style(TRANSPARENT)
        .label_style(FONT)
        .axis_desc_style(FONT)
        .draw()
        .unwrap();
    for (name, color, values) in curves {
        let (color, points) = (*color, || sizes.clone().zip(values.iter().copied()));
        chart
            .draw_series(LineSeries::new(points(), color.stroke_width(2)))
            .unwrap()
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color.stroke_width(2)));
        chart.draw_series(points().map(|point| Circle::new(point, 4, color.filled()))).unwrap();
    }
    if curves.len() > 1 {
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .border_style(BLACK.mix(0.3))
            .background_style(WHITE)
            .label_font(FONT)
            .draw()
            .unwrap();
    }
}
