"use strict";
fpldCharts.drawAll();
fpldTables.attach();
